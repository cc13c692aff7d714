// Keeps a visitor's log in their own browser: one line of JSON an event, each id once. Nothing of it is ever changed.

const KEY = "attention-interview-lab.log"
const MANY = 100 // lines that the server may send again and again; more are acknowledged

const idOf = (line) => line.match(/"id":"([0-9a-f]{32})"/)?.[1]

function keep(data) {
  if (data.forget !== null) localStorage.removeItem(KEY) // until the server has heard of it; what came since is in lines
  // read anew before each write: another tab may have added to it
  const held = localStorage.getItem(KEY) ?? ""
  const known = new Set(held.split("\n").map(idOf))
  const fresh = data.lines.filter((line) => !known.has(idOf(line)))
  if (fresh.length) localStorage.setItem(KEY, held + fresh.join("\n") + "\n")
  return held
}

export default function ({ data, setStateValue }) {
  try {
    const held = keep(data)
    if (!data.read && held) setStateValue("log", { held, failed: "" })
    else if (data.forget !== null) setStateValue("forgot", data.forget)
    else if (data.lines.length > MANY) setStateValue("kept", data.end)
  } catch (error) {
    // storage is switched off, or full: the page says so once
    if (!data.failed) setStateValue("log", { held: "", failed: error.name })
  }
}
