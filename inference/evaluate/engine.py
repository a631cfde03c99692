"""measure-engine: what evaluate-checkpoint measures, and the same methods in a serving engine (vLLM, …).

An arm is a way of decoding: the engine has two for each method, with its drafter and without one. A block is some
prompts that both continue. The engine's texts are compared with the reference's, those of the target without a drafter.
`Streams` are random numbers by name, from the seed.

plan, measure         as evaluate-checkpoint (`evaluation.py`), then the models leave the memory
serve                 `measure_served`: the engine continues the same prompts, block by block
judge                 `judge_served`: the target reads the engine's texts that differ from the reference's
write                 each method's `EnginePart` joins its report
"""

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.base.files import as_json_lines, write_atomically
from outrider.base.streams import Streams
from outrider.data_prep.text.prompts import Prompt
from outrider.inference.audit.answers import ServedAnswer
from outrider.inference.audit.audit import judge_arm, score_answers
from outrider.inference.batch.server import RETOKENISED
from outrider.inference.drafters.ngrams.drafter import open_table
from outrider.inference.evaluate import engine_blocks
from outrider.inference.evaluate.measuring import measure_prompts, open_queue
from outrider.inference.evaluate.planning import EvaluationPlan, begin_evaluation, end_evaluation, run_on_prompts
from outrider.inference.evaluate.reporting import EnginePart, write_report
from outrider.inference.loading.models import load_reference
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.measure.replay import replay_chains
from outrider.inference.measure.results import PromptResult, finished_results
from outrider.inference.measure.threads import judge_load
from outrider.inference.report.served import EngineRun, served_row
from outrider.inference.report.types import DRAFTED, NOT_LOSSLESS, PLAIN, UNREAD, ServedJudgement
from outrider.inference.settings.engine import EngineConfig, draft_length
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig
from outrider.inference.settings.sampling import SamplingConfig

LEVEL = 0.001  # the probability that the audit refuses correct sampled texts by chance


def measure_engine(config: EngineConfig) -> None:
    """Compare methods in this project's runtime and in an engine. Raises `UserError`."""
    run_on_prompts(config, evaluate_in_engine)


def evaluate_in_engine(config: EngineConfig, prompts: Sequence[Prompt]) -> None:
    """As `evaluate_checkpoint`. The engine measures after this runtime, when the memory holds no model any more."""
    config = replace(config, methods=config.all_methods, draft_tokens=())  # all_methods: one for each of them
    with begin_evaluation(config, prompts) as plan:
        engine_blocks.require_served(config, plan.setup, len(prompts), plan.processes.num_processes)
        queue = open_queue(plan)
        # prepared: None in a run that continues none. A stopped run may have exported others: they are replaced.
        engine_blocks.export_drafters(config, plan.setup, plan.out_dir, anew=queue.prepared is None)
        prepared = measure_prompts(plan, queue)
        plan.drafters.clear()
        gc.collect()  # the models leave the memory
        torch.cuda.empty_cache()
        lossy_methods = write_report(plan, prepared, serve_methods(config, plan), ("outrider", "measure-engine"))
    end_evaluation(plan, lossy_methods)


@dataclass(frozen=True)
class ServedBlocks:
    """The blocks that an engine measured. By position of a prompt in the run, `here` has this runtime's results, and
    `references` the reference's tokens, None if texts are drawn."""

    blocks: Sequence[engine_blocks.Block]
    here: Mapping[int, PromptResult]
    references: Mapping[int, Sequence[int]] | None


def serve_methods(config: EngineConfig, plan: EvaluationPlan) -> dict[str, EnginePart]:
    """Measure the methods that the engine of `config` runs, on the first turns of prompts; returns, by method, the
    engine's part of the report. Raises `UserError`."""
    results = {m.position: m.turns[0] for m in finished_results(plan.out_dir, config.batch) if m.turns}
    engine_blocks.require_served(config, plan.setup, len(results))  # minutes= may have left prompts out
    methods = engine_blocks.served_methods(config)
    blocks = engine_blocks.measure_served(config, plan.setup, methods, plan.rendered, sorted(results), plan.out_dir)
    reference_texts = {position: result.generations[result.reference].tokens for position, result in results.items()}
    served = ServedBlocks(blocks, results, None if config.sampling.temperature > 0 else reference_texts)
    judgements, streams = judge_served(config, plan.setup, served, plan.out_dir), Streams(config.seed).within("served")
    part_by_method = {}
    for name, method in methods.items():
        runs = (_collect_run(config, plan.setup, served, name, method, n_requests) for n_requests in config.concurrency)
        served_rows = tuple(served_row(run, streams.within(name, run.concurrency)) for run in runs)
        if (judgement := judgements.get(name, {}).get(DRAFTED)) and judgement.faults:
            served_rows = tuple(replace(row, verdict=NOT_LOSSLESS) for row in served_rows)
        part_by_method[name] = EnginePart(served_rows, judgements.get(name))
    return part_by_method


def _collect_run(
    config: EngineConfig, setup: TargetSetup, served: ServedBlocks, name: str, method: MethodConfig, concurrency: int
) -> EngineRun:
    """What the engine did with a method, `concurrency` requests at a time, beside this runtime's results."""
    reference_texts = served.references
    blocks = [block for block in served.blocks if (block.key.method, block.key.concurrency) == (name, concurrency)]
    results = [result for block in blocks for result in block.results]
    local_outputs = [served.here[_position(result)].generations[name] for result in results]
    kind = KINDS[method.source]
    if kind.vllm_method == "custom_class":  # our table of n-grams in vLLM: it drafts chains there, but trees here
        table = open_table(str(config.where(kind)), setup.target.vocabulary_digest, setup.target.vocabulary_size)
        prompt_text_pairs = ((result.prompt, result.generations[result.reference].tokens) for result in results)
        local_outputs = [replay_chains(table, prompt, text, draft_length(method)) for prompt, text in prompt_text_pairs]
    return EngineRun(
        engine=" and ".join(sorted({block.version for block in blocks})),
        options=config.engine_options,
        concurrency=concurrency,
        method=name,
        drafted=draft_length(method),
        results=results,
        here=local_outputs,
        references=None if reference_texts is None else [reference_texts[_position(result)] for result in results],
        totals={arm: sum(block.seconds[arm] for block in blocks) for arm in blocks[0].seconds},
        load=judge_load(cpu_shares=(), loads=(block.load for block in blocks), cores=os.cpu_count() or 1),
        counts=[(block.counts, len(block.results)) for block in blocks],  # counts: a server's, of accepted drafts
    )


def _position(result: PromptResult) -> int:
    """The position in the run of the prompt that an engine continued."""
    return int(str(result.conversation))  # `engine_blocks` stores the position as the conversation's id


def judge_served(
    config: EngineConfig, setup: TargetSetup, served: ServedBlocks, out: Path
) -> dict[str, dict[str, ServedJudgement]]:
    """By method and arm, the audit of the engine's texts that differ from the references; empty if none differs. The
    texts are written to files in `out`, so that they can be audited again. No faults are simulated."""
    judgements: dict[str, dict[str, ServedJudgement]] = {}
    answers_by_arm = differing_answers(served, engine_blocks.resolve_sampling(config, setup))
    if not answers_by_arm:
        return judgements
    model = load_reference(setup.target, setup.dtype, setup.device)
    keys = ("prompt_ids", "output_ids", "retokenised", *SamplingConfig.__dataclass_fields__)
    for (method, arm), answers in answers_by_arm.items():
        path, by_line = f"{engine_blocks.FOLDER}/{method}-{arm}.jsonl", dict(enumerate(answers, 1))
        write_atomically(out / path, as_json_lines({key: getattr(answer, key) for key in keys} for answer in answers))
        finding = judge_arm(score_answers(model, by_line, Streams(config.seed), simulate=False), by_line, LEVEL)
        judgement = ServedJudgement(len(answers), path, finding.verdict, finding.faults)
        judgements.setdefault(method, {})[arm] = judgement
    return judgements


def differing_answers(served: ServedBlocks, sampling: SamplingConfig) -> dict[tuple[str, str], list[ServedAnswer]]:
    """By (method, arm), the engine's texts that are not the references', each once; not those with unknown ids."""
    answers_by_arm: dict[tuple[str, str], dict[tuple[tuple[int, ...], ...], ServedAnswer]] = {}
    for method, result in ((block.key.method, result) for block in served.blocks for result in block.results):
        for name, output in result.generations.items():
            prompt, tokens, arm = result.prompt, output.tokens, DRAFTED if name == method else PLAIN
            if tokens == (served.references or {}).get(_position(result)) or UNREAD in output.totals:
                continue  # UNREAD: the text has ids that are unknown
            retokenised = RETOKENISED in output.totals  # the server sent text, whose ids were recovered
            answer = ServedAnswer(prompt_ids=[*prompt], output_ids=[*tokens], retokenised=retokenised, **vars(sampling))
            answers_by_arm.setdefault((method, arm), {})[prompt, tokens] = answer
    return {key: [*by_text.values()] for key, by_text in answers_by_arm.items()}
