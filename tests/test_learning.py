"""The learning core learns: sample, credit, update, again, on the smallest model there is."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treadle.batch import Example, divisor, pack
from treadle.credit import grpo
from treadle.learner import Learner
from treadle.losses import policy_loss
from treadle.types import End, Message, Node, Outcome, Source, Trajectory

PROMPT, RIGHT, GROUP = [1, 2, 3], 5, 32


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def rollout(number: int, token: int, log_prob: float) -> Trajectory:
    size = len(PROMPT)
    prompt = Node(
        id=0,
        parent=None,
        message=Message(role="user"),
        tokens=PROMPT,
        mask=[0] * size,
        log_probs=[None] * size,
        versions=[None] * size,
    )
    reply = Node(
        id=1,
        parent=0,
        message=Message(role="assistant"),
        tokens=[token],
        mask=[1],
        log_probs=[log_prob],
        versions=[0],
    )
    return Trajectory(
        id=str(number),
        task_id="t",
        environment="e",
        contract=None,
        source=Source.ROLLOUT,
        policy="p",
        nodes=[prompt, reply],
        outcome=Outcome(end=End.ANSWERED, reward=float(token == RIGHT)),
        group="g",
    )


def test_the_rewarded_reply_becomes_likely() -> None:
    """Outcome-only GRPO on one question with sixteen answers: from chance to almost always."""
    learner = Learner(tiny(), dtype="float32")
    rng = np.random.default_rng(0)
    rewards = []
    for _ in range(30):
        with torch.no_grad():
            logp_V = learner.model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).numpy()
        tokens = rng.choice(16, size=GROUP, p=np.exp(logp_V) / np.exp(logp_V).sum())
        group = [rollout(i, int(token), float(logp_V[token])) for i, token in enumerate(tokens)]
        outcomes = [t.outcome.reward for t in group]
        rewards.append(np.mean([reward or 0.0 for reward in outcomes]))
        advantages = grpo(outcomes)
        if not advantages.any():
            continue
        packs, _ = pack([Example(t, {1: float(a)}) for t, a in zip(group, advantages, strict=True)], 64)
        learner.forward_backward(packs, policy_loss(), divisor(packs))
        learner.step(1e-2)
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.9
