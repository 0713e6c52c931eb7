// Browsers refuse workers on pages that are opened as files. Search needs one: run its script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inner = this.frame.contentWindow
      const load = (source) => new Promise((done) => {
        const script = inner.document.createElement("script")
        script.src = source
        script.onload = script.onerror = done
        inner.document.body.appendChild(script)
      })
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = (...sources) => Promise.all(sources.map(load))
      load(url).then(() => {
        this.inner = inner
        this.waiting.forEach((data) => this.postMessage(data))
      })
    }
    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
    terminate() { this.frame.remove() }
  }
}
