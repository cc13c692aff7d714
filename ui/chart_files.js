// Saves the chart as it is drawn on the page: the SVG that stands there, or that SVG drawn on a canvas at twice its size.

const SCALE = 2

function save(blob, name) {
  const link = document.createElement("a")
  link.href = URL.createObjectURL(blob)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000)
}

function drawn(place) {
  return document.querySelector(`.st-key-${place} [data-testid="stVegaLiteChart"] svg.marks`)
}

// The page's own font faces that the chart is set in, with their files inside: an image knows no font of the page, and
// another font would be wider than the places that Vega has measured for the words.
async function fontFaces(chart) {
  const families = new Set([...chart.querySelectorAll("text")].map((text) => plainFamily(getComputedStyle(text).fontFamily)))
  const rules = [...document.styleSheets].flatMap(rulesOf).filter((rule) => rule instanceof CSSFontFaceRule)
  const used = rules.filter((rule) => families.has(plainFamily(rule.style.fontFamily)))
  return (await Promise.all(used.map(withFileInside))).join("\n")
}

const plainFamily = (family) => family.split(",")[0].replace(/["']/g, "").trim()

function rulesOf(sheet) {
  try {
    return [...sheet.cssRules]
  } catch {
    return [] // of another host: not to be read
  }
}

async function withFileInside(rule) {
  const found = rule.cssText.match(/url\(["']?([^"')]+)["']?\)/)
  if (!found || found[1].startsWith("data:")) return rule.cssText
  // without the file the chart is saved all the same, in a font of the reader's machine
  const answer = await fetch(new URL(found[1], rule.parentStyleSheet.href ?? document.baseURI)).catch(() => null)
  if (!answer?.ok) return ""
  const file = await new Response(await answer.blob()).arrayBuffer()
  const bytes = Array.from(new Uint8Array(file), (byte) => String.fromCharCode(byte)).join("")
  return rule.cssText.replace(found[0], `url("data:font/woff2;base64,${btoa(bytes)}")`)
}

async function svgText(chart) {
  const copy = chart.cloneNode(true)
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg")
  const style = document.createElementNS("http://www.w3.org/2000/svg", "style")
  style.textContent = await fontFaces(chart)
  copy.prepend(style)
  // Vega names a gradient by the address of the page, which stands in no file and says what the reader typed
  return new XMLSerializer().serializeToString(copy).replace(/url\((?:&quot;|["'])?http[^)#]*(#[^)"'&]+)(?:&quot;|["'])?\)/g, "url($1)")
}

async function saveSvg(chart, name) {
  save(new Blob([await svgText(chart)], { type: "image/svg+xml" }), `${name}.svg`)
}

async function savePng(chart, name) {
  const image = new Image()
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(await svgText(chart))}`
  await image.decode()
  const canvas = document.createElement("canvas")
  canvas.width = SCALE * image.width
  canvas.height = SCALE * image.height
  const context = canvas.getContext("2d")
  context.scale(SCALE, SCALE)
  context.drawImage(image, 0, 0)
  canvas.toBlob((blob) => save(blob, `${name}.png`), "image/png")
}

function button(label, onClick) {
  const made = document.createElement("button")
  made.type = "button"
  made.textContent = label
  made.addEventListener("click", onClick)
  return made
}

export default function ({ data, parentElement }) {
  const place = parentElement.querySelector(".chart-files")
  const message = document.createElement("p")
  const saving = (how) => async () => {
    const chart = drawn(data.place)
    message.textContent = chart ? "" : data.none
    if (chart) await how(chart, data.name)
  }
  place.replaceChildren(button(data.png, saving(savePng)), button(data.svg, saving(saveSvg)), message)
}
