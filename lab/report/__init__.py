"""One page of pictures and tables of what runs recorded."""
