// The list of receipts as one element: Streamlit draws every element of a page anew whenever anything on it is redrawn, and
// sixty receipts of eight elements each made a moved slider six times as slow.

const SIGNS = { holds: "✓", fails: "✗", stale: "↺", missing: "?" }

// d_k → d with a subscript, in text of our own cards; everything else as it stands.
function typeset(target, text) {
  let from = 0
  for (const match of text.matchAll(/([A-Za-z])_([A-Za-z0-9]+)/g)) {
    target.append(text.slice(from, match.index), match[1])
    const sub = document.createElement("sub")
    sub.textContent = match[2]
    target.append(sub)
    from = match.index + match[0].length
  }
  target.append(text.slice(from))
}

function element(tag, className, text) {
  const made = document.createElement(tag)
  made.className = className
  if (text !== undefined) typeset(made, text)
  return made
}

function row(receipt, labels, busy, renew) {
  const item = element("li", `receipt receipt-${receipt.verdict}`)
  item.id = receipt.id
  const sign = element("span", "receipt-sign", SIGNS[receipt.verdict])
  sign.title = labels[receipt.verdict]
  sign.setAttribute("role", "img")
  sign.setAttribute("aria-label", labels[receipt.verdict])
  const said = element("div", "receipt-said")
  said.append(element("p", "receipt-statement", receipt.statement))
  const id = element("code", "receipt-id")
  id.textContent = receipt.id
  said.append(id)
  if (receipt.limit) said.append(element("span", "receipt-limit", labels.limit))
  const shown = element("div", "receipt-shown")
  const measured = element("p", "receipt-measured")
  if (receipt.value) measured.append(element("span", "receipt-value", receipt.value), " ")
  measured.append(element("span", "receipt-about", receipt.about))
  shown.append(measured, element("p", "receipt-where", receipt.where))
  if (receipt.why) shown.append(element("p", "receipt-why", receipt.why))
  const button = element("button", "receipt-renew", labels.renew)
  button.type = "button"
  button.disabled = busy
  button.setAttribute("aria-label", `${labels.renew}: ${receipt.id}`)
  button.onclick = () => renew(receipt.id)
  item.append(sign, said, shown, button)
  return item
}

export default function ({ data, parentElement, setTriggerValue }) {
  const list = parentElement.querySelector("ol.receipts")
  const stamp = JSON.stringify(data)
  if (list.dataset.stamp === stamp) return
  list.dataset.stamp = stamp
  const renew = id => setTriggerValue("renew", id)
  list.replaceChildren(...data.receipts.map(receipt => row(receipt, data.labels, data.busy, renew)))
  const wanted = decodeURIComponent(location.hash.slice(1))
  if (wanted && !list.dataset.opened) document.getElementById(wanted)?.scrollIntoView()
  list.dataset.opened = "yes"
}
