"""prototype"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fedalign.protocol.aggregate import shares, weighted_mean
from fedalign.protocol.fedalign import broadcast, invite, without
from fedalign.protocol.messages import *
from fedalign.protocol.plan import Plan
from fedalign.protocol.records import History
from fedalign.protocol.round_log import RoundLog
from fedalign.protocol.scores import scores
from fedalign.rules.auto import _sizes
from fedalign.rules.rule import Selection
from fedalign.training.server import ServerModel


@dataclass(frozen=True)
class State:
    served: Any
    training: ServerModel
    own: ServerModel
    deficit: float = 0.0
    q: float = 1.0
    rep: dict = field(default_factory=dict)


def verified(plan: Plan, snapshot: Snapshot):
    history = History()
    w = ServerModel(snapshot.tensors["model"])
    state = State(w.weights, w, w)
    theta = 0.0
    for t in range(plan.rounds):
        log = RoundLog(plan, t)
        state = yield from one_round(plan, t, state, log)
        measured = yield from scores(plan, log.roster, state.served, state.training.weights)
        record = log.record(measured, theta)
        yield RoundDone(record, state.served, Snapshot(t + 1, {"model": state.served}, {}))
        history.rounds.append(record)
    return Result(state.served, history)


def mean_of(roster, m):
    return weighted_mean(roster, m) if m else (math.inf, None)


def one_round(plan, t, state, log):
    rule = plan.rule
    log.present = yield WhoIsThere(t)
    P = log.present.priority
    w = state.training.weights
    sent = yield from broadcast(plan, t, w, log)
    offers = yield from invite(plan, w, sent, log)
    sims = log.similarities if hasattr(log, "similarities") else {}
    prio = tuple(log.trained)
    lens = sorted(sims[k].length for k in prio) if sims else []
    med = (
        lens[len(lens) // 2]
        if len(lens) % 2
        else (lens[len(lens) // 2 - 1] + lens[len(lens) // 2]) / 2
        if lens
        else 1.0
    )
    offers = {k: o for k, o in offers.items() if o.length > 0}
    step = {k: min(1.0, rule.clip * med / o.length) for k, o in offers.items()}

    def mix(cl, within=math.inf):
        sh = shares(log.present, sorted([*prio, *cl]))
        free = sum(v for k, v in sh.items() if k not in prio)
        own = 1 - free
        if free > rule.total * own:
            f = rule.total * own / free
            tot = own + f * free
            sh = {k: (v if k in prio else v * f) / tot for k, v in sh.items()}
        return Mix(sh, {k: step[k] for k in cl}, prio if cl else (), within)

    # own trajectory: train priority clients from own
    # probes
    base_mix = mix(())
    probes = list(offers)
    within = rule.within
    while True:
        agg = yield Aggregate((base_mix, *(mix((k,), within) for k in probes)))
        if not agg.refused:
            break
        log.refuse(agg.refused)
        offers = without(offers, agg.refused)
        probes = list(offers)
    ans = yield Evaluate(tuple((m, prio) for m in agg.models), plan.evaluate_on)
    L0, A0 = mean_of(log.roster, ans[0])
    e = {k: mean_of(log.roster, ans[1 + i])[0] - L0 for i, k in enumerate(probes)}
    e = {k: (v if math.isfinite(v) else 1e9) for k, v in e.items()}
    scale = max(1e-9, sorted(abs(v) for v in e.values())[len(e) // 2]) if e else 1.0
    rep = dict(state.rep)
    for k, v in e.items():
        x = max(-5, min(5, v / scale))
        rep[k] = x if k not in rep else (1 - rule.smooth) * rep[k] + rule.smooth * x
    score = {k: (rep[k] if rule.credit else max(rep[k], max(-5, min(5, e[k] / scale)))) for k in e}
    order = sorted(e, key=lambda k: (score[k], e[k]))
    cands = [()] + [tuple(sorted(order[:n])) for n in _sizes(len(order))]
    mixes = [mix(c, within) for c in cands]
    # broad training set
    broad = None
    if rule.training != "served":
        n = max(1, math.ceil(state.q * len(order)))
        broad = tuple(sorted(k for k in order[:n] if offers[k].cosine >= rule.cosine))
        if broad not in cands:
            cands.append(broad)
            mixes.append(mix(broad, within))
    nclamp = len(mixes)
    if within < math.inf and rule.prefer < math.inf:
        mixes += [mix(c) for c in cands[1:]]
    agg = yield Aggregate(tuple(mixes))
    assert not agg.refused
    ans = yield Evaluate(tuple((m, prio) for m in agg.models), plan.evaluate_on)
    loss = [mean_of(log.roster, a)[0] for a in ans]
    acc = [mean_of(log.roster, a)[1] for a in ans]
    loss = [l if math.isfinite(l) else math.inf for l in loss]
    best = min(range(nclamp), key=lambda i: (loss[i], len(cands[i])))
    free_best = best
    if nclamp < len(mixes):
        b2 = min(range(nclamp, len(mixes)), key=lambda i: loss[i])
        if loss[b2] < loss[best] * (1 - rule.prefer):
            free_best = b2
    allc = cands + cands[1:] if nclamp < len(mixes) else cands
    # training model
    tr = free_best
    if rule.training != "served" and broad is not None:
        idx = cands.index(broad)
        lim = max(sent.loss, loss[free_best]) * (1 + rule.tolerance)
        off = 0 if free_best < nclamp else (len(cands) - 1)
        opts = [i for i in range(len(cands)) if set(cands[i]) <= set(broad) and loss[i + off if cands[i] else 0] <= lim]
        if rule.training == "broad":
            i = max(opts, key=lambda i: len(cands[i]), default=None)
            if i is not None:
                tr = i + off if cands[i] else 0
    training = state.training.step(agg.models[tr], plan.server)
    choice = agg.models[free_best]
    # own
    if state.own.weights is state.training.weights:
        own = ServerModel(agg.models[0])
        ol, oa = loss[0], acc[0]
    else:
        replies = yield Invite(state.own.weights, prio, sent, plan.rule, plan.match_on)
        a2 = yield Aggregate((Mix(shares(log.present, prio)),))
        own = ServerModel(a2.models[0])
        (m2,) = yield Evaluate(((own.weights, prio),), plan.evaluate_on)
        ol, oa = mean_of(log.roster, m2)
    now = (oa - acc[free_best]) if oa is not None else 0.0
    deficit = max(0.0, 0.9 * state.deficit + 0.1 * now)
    behind = deficit > 0.005 or loss[free_best] > ol
    q = state.q
    if behind:
        q = max(0.05, q / 2) if loss[free_best] > ol * 1.0 else q
        if loss[free_best] > ol * 1.02:
            training = own
    else:
        q = min(1.0, q * 1.05)
    served = own.weights if behind else choice
    rule.log.append(
        (
            t,
            dict(
                e=e,
                cos={k: o.cosine for k, o in offers.items()},
                best=allc[free_best],
                tr=allc[tr],
                clamp=free_best < nclamp,
                loss=loss[free_best],
                ol=ol,
                acc=acc[free_best],
                oa=oa,
                behind=behind,
                q=q,
                L0=L0,
                F=sent.loss,
            ),
        )
    )
    log.admitted(Selection(allc[free_best]), mixes[free_best].shares, (mixes[tr].shares, {}))
    return State(served, training, own, deficit, q, rep)
