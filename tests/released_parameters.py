"""Parameters of released checkpoints, as they hold them: a reference from outside for what the engine counts."""

# Gemma 3 without 64 padded rows of the vocabulary and without vision
RELEASED_PARAMETERS = {
    "gpt_2_small": 124_439_808,
    "gemma_2b": 2_506_172_416,
    "llama_2_7b": 6_738_415_616,
    "llama_2_70b": 68_976_648_192,
    "llama_3_8b": 8_030_261_248,
    "llama_3_70b": 70_553_706_496,
    "mistral_7b": 7_241_732_096,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_4b": 4_022_468_096,
    "gemma_2_9b": 9_241_705_984,
    "gemma_3_27b": 27_009_346_304 - 64 * 5376,
}
