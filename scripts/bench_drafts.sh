#!/usr/bin/env bash
# Trees of a draft model, with the same model and the same number of nodes: dynamic, static, drawn, and vLLM's chain.
# Arguments: folder of the draft, folder of the JSON files (drafts), node budgets (8 16 32), temperatures (0 1).
# VLLM_EXT_DATA as in readme_bench.sh. Tokens per step depend on no clock: another program may run beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
draft=$(realpath "$1")
output=${2:-drafts}
data=${VLLM_EXT_DATA:-../shared/data}
mkdir -p "$output"
model=$(.venv/bin/python -c 'from vllm_ext import demo_model; print(demo_model.ensure_model())' | tail -1)
for nodes in ${3:-8 16 32}; do
    # As many nodes as there may be, in different shapes; a chain first. vLLM's chain also at its usual length.
    case $nodes in
        8) shapes='[1,1,1,1,1,1,1,1] [2,1,1,1] [3,1,1] [4,1]' drafts='2 4' widths='2 3' ;;
        16) shapes='[1,1,1,1,1,1,1,1] [4,1,1,1] [3,2,1] [2,2,1,1] [8,1]' drafts='2 4' widths='3 4' ;;
        32) shapes='[1,1,1,1,1,1,1,1] [8,1,1,1] [4,2,1,1] [5,2,1] [3,2,1,1,1]' drafts='4 8' widths='4 6' ;;
        *) echo "no shapes for $nodes nodes; 8, 16 and 32 have some" >&2 && exit 1 ;;
    esac
    common="model=$draft,num_speculative_tokens=$nodes,budget=fixed"
    for temperature in ${4:-0 1}; do
        # Nine engines fit into 24 GB. Drawn: the first three shapes (which are RSD-C's) beside SpecTr's and RSD-S's.
        methods="plain,dyspec($common)"
        if [ "$temperature" = 0 ]; then
            for shape in $shapes; do methods+=",static_tree($common,branching=$shape)"; done
            for length in 4 8; do methods+=",draft_model(model=$draft,num_speculative_tokens=$length)"; done
        else
            for shape in $(echo "$shapes" | cut -d' ' -f1-3); do methods+=",rsd_c($common,branching=$shape)"; done
            for k in $drafts; do methods+=",spectr($common,drafts=$k)"; done
            for width in $widths; do methods+=",rsd_s($common,width=$width)"; done
        fi
        json=$output/nodes-$nodes-temperature-$temperature.json
        VLLM_PLUGINS=vllm_ext .venv/bin/vllm-ext bench --model "$model" --prompts "$data/spec_bench.jsonl:2" \
            --prompts "$data/human_eval.jsonl:4" --methods "$methods" --batch-size 8 --max-tokens 96 --rounds 1 \
            --dtype bfloat16 --kv-cache-memory-bytes 268435456 --temperature "$temperature" --json "$json"
    done
done
