// Browsers start no worker from a file, so a page that was opened as a file has no search. There a
// frame takes the place of the worker: it runs the same script and answers the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      // A frame that was written to is not emptied again, as Firefox would.
      this.inside.document.open()
      this.inside.document.write("<body>")
      this.inside.document.close()
      // Called by the script in the frame.
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise(done => {
        const script = this.inside.document.createElement("script")
        script.onload = done
        script.src = new URL(url, location.href).href
        this.inside.document.body.appendChild(script)
      })
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
      )
    }
  }
}
