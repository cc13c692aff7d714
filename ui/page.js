// What a page needs of the browser beside its text. Streamlit leaves a page scrolled where it was when it turns to something
// else (another card, the next question), and keeps the keyboard for an option that was clicked: shortcuts would be dead.

let shown = null
let pointed = 0
let filled = 0

addEventListener("pointerdown", () => (pointed = performance.now()), true)
addEventListener("change", ({ target }) => {
  if (target.matches?.("input[type=radio], input[type=checkbox]") && performance.now() - pointed < 1000) target.blur()
})

export default function ({ data }) {
  if (shown !== null && shown !== data.place && !location.hash) {
    document.querySelector('[data-testid="stMain"]')?.scrollTo({ top: 0 })
  }
  shown = data.place
  // a lab that was filled in from the text may be far above or below it
  if (data.filled > filled) document.querySelector(".st-key-bench")?.scrollIntoView({ behavior: "smooth" })
  filled = Math.max(filled, data.filled)
}
