// A button that reads a text file of the reader. Streamlit's own uploader speaks English only.

export default function ({ data, parentElement, setTriggerValue }) {
  const place = parentElement.querySelector(".file-picker")
  const input = document.createElement("input")
  input.type = "file"
  input.accept = data.accept
  input.hidden = true
  input.addEventListener("change", async () => {
    const file = input.files[0]
    if (!file) return
    const readable = file.size <= data.most
    setTriggerValue("file", { name: file.name, text: readable ? await file.text() : "", size: file.size })
    input.value = "" // the same file may be chosen again
  })
  const button = document.createElement("button")
  button.type = "button"
  button.textContent = data.label
  button.addEventListener("click", () => input.click())
  place.replaceChildren(button, input)
}
