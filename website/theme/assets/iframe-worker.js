// Search runs in a worker, and browsers start none for pages opened from disk. There a hidden frame stands in for it: the
// worker's script runs inside the frame, and messages pass between the frame and this page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      const inside = frame.contentWindow
      const base = new URL(address, location.href)
      const load = source => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.src = new URL(source, base)
        script.onload = resolve
        script.onerror = () => reject(new Error(`cannot load ${source}`))
        inside.document.head.appendChild(script)
      })
      // What the worker sends arrives here as a message event.
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      inside.importScripts = (...sources) => sources.reduce((done, next) => done.then(() => load(next)), Promise.resolve())
      load(base).then(() => {
        this.inside = inside
        this.waiting.splice(0).forEach(data => this.postMessage(data))
      })
    }
    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
    terminate() {}
  }
}
