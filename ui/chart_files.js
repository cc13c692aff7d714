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

function svgText(chart) {
  const copy = chart.cloneNode(true)
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg")
  return new XMLSerializer().serializeToString(copy)
}

async function saveSvg(chart, name) {
  save(new Blob([svgText(chart)], { type: "image/svg+xml" }), `${name}.svg`)
}

async function savePng(chart, name) {
  const image = new Image()
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(chart))}`
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
