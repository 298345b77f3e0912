"""What runs recorded, as one page of pictures and tables."""
