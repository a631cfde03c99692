"""What students of the target's hidden states share, whatever head they train: EAGLE-3 heads and block drafters.

A draft of `steps` tokens begins after every position. Token j is predicted in step t by the draft after position
j − 2 − t, of which the target's hidden states are known, and whose first token, at position j − 1 − t, is the text's.

A head reads the target's aux hidden states: those at its taps, k boundaries of target layers. Logits are kept as a
product of states and a matrix, and a rule from the product to the logits, such as a scale.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.base.progress import track_progress
from outrider.draft_models.acceptance import acceptance_by_target, argmax_and_acceptance, tau_of_rounds
from outrider.draft_models.draft_vocabulary import draft_indices
from outrider.draft_models.heads.layers import DraftHead
from outrider.draft_models.losses import IGNORE, PLAIN, head_product, linear_cross_entropy, linear_divergence
from outrider.draft_models.targets.model_spec import LogitRule
from outrider.draft_models.targets.stack import LayerStack
from outrider.train.core.training import Batch, Metrics, Student
from outrider.train.parts.position_weights import Factors, Slots, cat_weights, dpace_weights, probabilities_of
from outrider.train.parts.steps import Predictions, acceptance_of_drafts, loss_mask_per_step
from outrider.train.settings.drafters import HeadConfig

BATCH = ("input_ids", "labels", "positions", "documents")


class HeadStudent(Student, ABC):
    """A head that learns in float32, on the frozen layers of a whole target.

    Every token is predicted `steps` times, by drafts that began 0, 1, … tokens earlier. The weight of a step is
    `step_decay` times that of the previous step, and all weights sum to 1. Step t is drawn to be learnt at a share
    `step_shares[t]` of the positions, with 1 / share times the weight. So the expected loss and gradient are those of
    all positions. With position_weights=none each step has the weight 1 / `steps`; cat and dpace multiply that by
    weights of slots, the steps of one draft: by the target's (cat) or the drafter's probabilities of the slots' labels.
    """

    step_weights: Tensor  # [steps], with 1 / share

    def __init__(
        self, stack: LayerStack, head: DraftHead, config: HeadConfig, steps: int, step_shares: Sequence[float]
    ) -> None:
        super().__init__()
        self.stack, self.head = stack.requires_grad_(False), head.float().requires_grad_(True)
        self.objective, self.steps, self.seed = config.objective, steps, config.fit.seed
        self.position_weights, self.recomputes = config.position_weights, False
        decay = config.step_decay if self.position_weights == "decay" else 1.0
        decay_weights = torch.tensor([decay**step for step in range(self.steps)], device=stack.device)  # [steps]
        position_shares = torch.tensor(step_shares, device=stack.device)  # [steps]
        self.register_buffer("step_weights", decay_weights / decay_weights.sum() / position_shares, persistent=False)
        if head.embed_tokens is not None:
            head.embed_tokens.requires_grad_(False)

    @property
    def saved_part(self) -> nn.Module:
        """The head, whose matrix of logits and embedding may be frozen."""
        return self.head

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the head's layers in the backward pass."""
        self.recomputes = True

    @abstractmethod
    def draw(self, loss_mask: Tensor, input_ids: Tensor) -> Tensor:
        """Those of the predictions `loss_mask`, bool [B, T, steps], that this optimizer step draws to learn."""

    @abstractmethod
    def unroll(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor, aux_states: Tensor, loss_mask: Tensor
    ) -> Predictions:
        """The head's predictions where `loss_mask`, bool [B, T, steps], of packed rows [B, T].

        aux_states [B, T, k · H_t]: the target's aux hidden states.
        """

    @abstractmethod
    def product(self, predictions: Predictions, input_ids: Tensor) -> Factors:
        """States [n, d] and the matrix [V', d] whose product is the logits of the predictions."""

    @property
    def rule(self) -> LogitRule:
        """From the `product` to the logits."""
        return PLAIN

    def forward(
        self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, states: Tensor | None = None
    ) -> dict[str, Tensor]:
        """{"loss_sum"} over supervised positions. All arguments are [B, T] (see `data_prep.text.rows`).

        states: the output of `target_states` for them; None: the target runs.
        """
        if states is None:
            states = self.target_states(input_ids, positions, documents)  # [B, T, k + 1, H_t]
        aux_states, final_states = states.to(self.stack.dtype).split([states.shape[2] - 1, 1], 2)
        # Cross-entropy has no loss for labels outside the draft vocabulary; a divergence has.
        draft_tokens = self.head.draft_tokens if self.objective == "cross_entropy" else None
        draft_labels = draft_indices(labels, draft_tokens, self.head.vocabulary)
        loss_mask = self.draw(loss_mask_per_step(draft_labels, documents, self.steps), input_ids)  # [B, T, steps]
        predictions = self.unroll(input_ids, positions, documents, aux_states.flatten(2), loss_mask)
        logit_factors = self.product(predictions, input_ids)
        loss_weights = self.weigh(logit_factors, predictions, final_states[:, :, 0], labels)  # [n]
        return {"loss_sum": self.loss(logit_factors, predictions, final_states[:, :, 0], labels, loss_weights)}

    def weigh(self, logit_factors: Factors, predictions: Predictions, target_states: Tensor, labels: Tensor) -> Tensor:
        """The weights [n] of the predictions: by step, with cat and dpace also by slot. Arguments: see `loss`."""
        step_numbers, loss_weights = predictions.steps, self.step_weights[predictions.steps]  # [n] each
        if self.position_weights == "decay" or self.position_weights == "none":
            return loss_weights
        # The anchor of a draft is the position of its first label.
        slots = Slots(self.position_weights, predictions.labels - step_numbers, step_numbers, self.steps, labels.shape)
        if slots.kind == "cat":
            target_factors = head_product(self.stack.head, target_states)
            return loss_weights * cat_weights(slots, probabilities_of(labels, target_factors, self.stack.spec.logits))
        label_probs = probabilities_of(self.classes(predictions, labels), logit_factors, self.rule)  # [n], all labelled
        return loss_weights * dpace_weights(slots, label_probs, torch.ones_like(step_numbers, dtype=torch.bool))

    def classes(self, predictions: Predictions, labels: Tensor) -> Tensor:
        """The labels [n] of the predictions as indices into the draft vocabulary, `IGNORE` outside it."""
        return draft_indices(labels.flatten()[predictions.labels], self.head.draft_tokens, self.head.vocabulary)

    def loss(
        self, product: Factors, predictions: Predictions, target: Tensor, labels: Tensor, loss_weights: Tensor | None
    ) -> Tensor:
        """The loss summed over n predictions, weighted by `loss_weights` [n].

        target [B, T, H_t]: the target's states after its final norm. labels [B, T].
        """
        if self.objective == "cross_entropy":
            classes = self.classes(predictions, labels)
            return linear_cross_entropy(*product, classes, rule=self.rule, shares=loss_weights)
        # Predictions of a label, neighbours in their order, share the target's distribution: `owners` says which.
        label_indices, inverse = predictions.labels.unique_consecutive(return_inverse=True)
        all_factors = (*product, *head_product(self.stack.head, target.flatten(0, 1)[label_indices]))
        return linear_divergence(
            *all_factors, labels=None, kind=self.objective, rule=self.rule, target_rule=self.stack.spec.logits,
            tokens=self.head.draft_tokens, owners=inverse, shares=loss_weights,
        )  # fmt: skip

    @torch.no_grad()
    def target_states(self, input_ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """The target's k aux hidden states and, last, its states after the final norm: [B, T, k + 1, H_t]."""
        stack = self.stack
        with torch.autocast(input_ids.device.type, enabled=False):
            stack.reserve(positions.shape[1])
            hidden, rotary = stack.embed(input_ids, positions), stack.rotary(positions)
            masks = stack.packed_masks(documents)
            hidden, aux_states = stack.run_with_aux(hidden, 0, len(stack.layers), rotary, masks, self.head.reading.taps)
            return torch.stack([*aux_states, stack.norm(hidden)], 2)

    def states_of(self, batch: Batch) -> Tensor:
        """`target_states` of a batch on any device."""
        inputs = (batch[name].to(self.stack.device) for name in ("input_ids", "positions", "documents"))
        return self.target_states(*inputs)


def score_steps(student: HeadStudent, batches: Sequence[Batch], step_count: int) -> Metrics:
    """The metrics of `student` on `batches` of rows.

    loss_<i>, agree_<i>: for the i-th token of a draft, the loss and the share of positions where the head's most likely
    token is the target's. tau_analytic: the expected τ of sampling (see `expected_tau`).
    """
    tracked_batches, metrics = track_progress(batches, "judging held-out text", "batches"), Metrics()
    batch_scores = [score_batch(student, batch, step_count) for batch in tracked_batches]
    sums_by_step = torch.stack([batch_sums for batch_sums, _ in batch_scores]).sum(0).tolist()
    for i, (count, loss_count, loss_sum, agreed) in enumerate(sums_by_step, 1):
        if count:  # no draft reaches a step beyond the texts
            metrics |= {f"agree_{i}": agreed / count} | ({f"loss_{i}": loss_sum / loss_count} if loss_count else {})
    taus = torch.cat([tau_of_rounds(acceptance_of_drafts(accept_probs)) for _, accept_probs in batch_scores])
    return metrics | ({"tau_analytic": taus.double().mean().item()} if len(taus) else {})


@torch.no_grad()
def score_batch(student: HeadStudent, batch: Batch, step_count: int) -> tuple[Tensor, Tensor]:
    """The head's results on a batch of rows in each of `step_count` steps.

    Returns float64 [steps, 4]: the number of predictions, of those with a loss, their loss, and how many have the
    target's most likely token as theirs; and the acceptance probability, by the position of the label, [B, T, steps],
    NaN where there is no prediction.
    """
    stack, head = student.stack, student.head
    input_ids, labels, positions, documents = (batch[name].to(stack.device) for name in BATCH)
    target_states = student.target_states(input_ids, positions, documents)
    loss_mask = loss_mask_per_step(labels, documents, step_count)
    predictions = student.unroll(input_ids, positions, documents, target_states[:, :, :-1].flatten(2), loss_mask)
    label_indices, inverse = predictions.labels.unique_consecutive(return_inverse=True)
    target_rows, logits_of = target_states[:, :, -1].flatten(0, 1)[label_indices], stack.logits_after_norm
    states, matrix = student.product(predictions, input_ids)
    matrix = matrix.to(states.dtype)  # of another dtype if it is the target's
    choices, accept_probs = argmax_and_acceptance(
        lambda x: head.spread(student.rule(x @ matrix.T)), states, acceptance_by_target(logits_of, target_rows[inverse])
    )
    assert accept_probs is not None
    probs_by_label = accept_probs.new_full((labels.numel(), step_count), torch.nan)
    probs_by_label[predictions.labels, predictions.steps] = accept_probs
    agrees, step_sums = choices == argmax_and_acceptance(logits_of, target_rows, None)[0][inverse], list[Tensor]()
    for step in range(step_count):
        in_step = predictions.steps == step
        step_predictions = Predictions(*(values[in_step] for values in predictions))
        loss = student.loss((states[in_step], matrix), step_predictions, target_states[:, :, -1], labels, None)
        has_loss = in_step[in_step]  # all of them
        if student.objective == "cross_entropy":  # the other labels are outside the draft vocabulary
            has_loss = student.classes(step_predictions, labels) != IGNORE
        step_sums.append(torch.stack([in_step.sum(), has_loss.sum(), loss.double(), (agrees & in_step).sum()]))
    return torch.stack(step_sums).cpu(), probs_by_label.unflatten(0, labels.shape)
