// Keeps a visitor's log in their own browser: one line of JSON an event, each id once. Nothing of it is ever changed.
// Forgetting leaves its time behind, so that another tab does not write back what it still held.

const KEY = "attention-interview-lab.log"
const FORGOTTEN = "attention-interview-lab.forgotten"
const MANY = 100 // lines that the server may send again and again; more are acknowledged

const idOf = (line) => line.match(/"id":"([0-9a-f]{32})"/)?.[1]
const timeOf = (line) => Date.parse(line.match(/"at":"([^"]+)"/)?.[1])

// What the log holds now, when it was last forgotten, and whether this visit knew of that.
function keep(data) {
  if (data.forget && localStorage.getItem(FORGOTTEN) !== data.forget) {
    // once: what another tab writes later stays
    localStorage.removeItem(KEY)
    localStorage.setItem(FORGOTTEN, data.forget)
  }
  const forgotten = localStorage.getItem(FORGOTTEN) ?? ""
  const known = !data.read || data.forget || data.forgotten === forgotten
  const lines = known ? data.lines : data.lines.filter((line) => timeOf(line) > Date.parse(forgotten))
  // read anew before each write: another tab may have added to it
  const held = localStorage.getItem(KEY) ?? ""
  const ids = new Set(held.split("\n").map(idOf))
  const fresh = [...lines, ...data.imported].filter((line) => !ids.has(idOf(line)))
  const all = fresh.length ? held + fresh.join("\n") + "\n" : held
  if (fresh.length) localStorage.setItem(KEY, all)
  return { all, forgotten, known }
}

// Called with what the server holds, and when another tab has written.
function look(data, setTriggerValue, told) {
  // an answer names the visit that it is for: a page may be taken up by another one
  const answer = (name, values) => setTriggerValue(name, { visit: data.visit, ...values })
  try {
    const { all, forgotten, known } = keep(data)
    if (told || (!data.read && all) || !known) answer("log", { held: all, forgotten, failed: "" })
    else if (data.forget) answer("forgot", { forgotten })
    else if (data.lines.length > MANY || data.imported.length)
      answer("kept", { end: data.end, imported: data.imported.length })
  } catch (error) {
    // storage is switched off, or full: the page says so once
    if (!data.failed) answer("log", { held: "", forgotten: "", failed: error.name })
  }
}

let tell = null // what is drawn now
addEventListener("storage", ({ key }) => {
  if (tell && (key === KEY || key === FORGOTTEN || key === null)) tell()
})

export default function ({ data, setTriggerValue }) {
  look(data, setTriggerValue, false)
  tell = () => look(data, setTriggerValue, true)
  return () => {
    tell = null
  }
}
