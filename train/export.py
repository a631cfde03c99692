"""A drafter as a serving engine loads it: an early exit as an ordinary causal LM, a head in another trainer's format.

outrider export checkpoint=runs/eesd engine=llama_cpp out_dir=runs/served
python train/export.py checkpoint=runs/eagle3 target=MODEL engine=vllm out_dir=runs/served
"""

from outrider.commands import script

main = script("export", "outrider.train.exporting:export_drafter")

if __name__ == "__main__":
    main()
