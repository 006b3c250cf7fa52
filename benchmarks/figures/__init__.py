"""The paper's accuracy figures (InfiniGen, OSDI 2024) as commands for any model.

    python -m benchmarks.figures NAME --model DIR --text F --json F --plot F

    kv-size       figure 11   quality against relative KV size
    chunks        figure 12   perplexity by position
    skewing       figure 13   with and without skewing
    sensitivity   figure 17   alpha and partial ratio (accuracy)
    long-context  figure 19   64 tokens kept at growing length
    pool          table 2     limits of the host pool, by eviction order

Each sets defaults for the options of `infinigen_jax.evaluate`, all of which remain, and adds a
table and a diagram. `infinigen_jax.evaluation` does the measurement. Where the paper reports
accuracy on tasks, --tasks (of lm-eval) replaces --text.
"""
