//! Choosing the next token from a row of logits, without an array of the whole vocabulary.
//!
//! Everything here is pure: the same row, history and seed give the same token, on whatever thread and in whatever
//! order. A token's place in the completion is the only state of the random stream, so that undoing tokens is
//! forgetting them.

mod mask;
mod scan;

pub(crate) use mask::{Mask, Masks};

use crate::config::{PENALTY_WINDOW, SamplingConfig};
use crate::model::Token;
use rayon::prelude::*;
use scan::BLOCK;

/// A token that was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    pub(crate) token: Token,
    /// The most likely token of the raw row.
    pub(crate) argmax: Token,
    /// The token's log-probability under the raw distribution; 0 if it was not asked for.
    pub(crate) logprob: f32,
}

/// What one choice depends on, besides the row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) config: &'a SamplingConfig,
    /// The completion's seed, never 0.
    pub(crate) seed: u64,
    /// The completion's tokens so far.
    pub(crate) history: &'a [Token],
    pub(crate) mask: Mask,
    pub(crate) logprob: bool,
}

/// Memory that choices reuse. One for each row that is sampled at the same time.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    block_max: Vec<f32>,
    order: Vec<f32>,
    candidates: Vec<Candidate>,
    penalized: Vec<(Token, f32)>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: Token,
    logit: f32,
    weight: f32,
}

/// Logits to look at from which on several threads are faster than one, which need not be woken.
const MIN_SHARED_WORK: usize = 800_000;

/// Threads that share out the rows of whoever runs in this pool; `None`: one is enough.
pub(crate) fn pool(threads: usize) -> Option<rayon::ThreadPool> {
    let name = |index| format!("decoder-{index}");
    // Without its threads it is slower, not wrong.
    (threads > 1)
        .then(|| rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build())
        .and_then(Result::ok)
}

/// Chooses for all outputs of a step.
pub(crate) struct Sampler {
    scratch: Vec<Scratch>,
    choices: Vec<Option<Choice>>,
}

impl Sampler {
    /// For up to `rows` rows at a time.
    pub(crate) fn new(rows: usize) -> Self {
        Self { scratch: (0..rows).map(|_| Scratch::default()).collect(), choices: Vec::with_capacity(rows) }
    }

    /// Chooses a token from each of `logits`' rows of `vocabulary` values; the `n`-th as `request(n)` says. In a
    /// [`pool`], its threads help.
    pub(crate) fn sample<'a>(
        &mut self,
        logits: &mut [f32],
        vocabulary: usize,
        request: impl Fn(usize) -> Request<'a> + Sync,
        masks: &Masks,
    ) -> &[Option<Choice>] {
        let count = logits.len() / vocabulary;
        self.choices.clear();
        self.choices.resize(count, None);
        let work = |index: usize, row: &mut [f32], scratch: &mut Scratch, choice: &mut Option<Choice>| {
            *choice = choose(row, &request(index), masks, scratch);
        };
        let looks: usize = (0..count).map(|index| looks(&request(index))).sum();
        if looks * vocabulary >= MIN_SHARED_WORK && rayon::current_thread_index().is_some() {
            let rows = logits.par_chunks_exact_mut(vocabulary);
            let jobs = rows.zip(&mut self.scratch[..count]).zip(&mut self.choices[..]).enumerate();
            jobs.for_each(|(index, ((row, scratch), choice))| work(index, row, scratch, choice));
        } else {
            let rows = logits.chunks_exact_mut(vocabulary);
            for (index, ((row, scratch), choice)) in
                rows.zip(&mut self.scratch).zip(&mut self.choices).enumerate()
            {
                work(index, row, scratch, choice);
            }
        }
        &self.choices
    }

    pub(crate) fn choices(&self) -> &[Option<Choice>] {
        &self.choices
    }
}

/// How often a choice looks at each logit, or what takes as long: the sum behind a log-probability takes three times as long
/// as the search for the highest.
fn looks(request: &Request<'_>) -> usize {
    1 + usize::from(request.config.temperature > 0.0) + 3 * usize::from(request.logprob)
}

/// Chooses a token from `row`, which is changed. `None`: the row holds no finite value that may be chosen.
pub(crate) fn choose(
    row: &mut [f32],
    request: &Request<'_>,
    masks: &Masks,
    scratch: &mut Scratch,
) -> Option<Choice> {
    let config = request.config;
    scan::block_maxima(row, &mut scratch.block_max);
    let argmax = scan::argmax(row, &scratch.block_max)?;
    let max = row[argmax];
    if !max.is_finite() {
        return None;
    }
    let log_sum = if request.logprob { max + scan::sum_exp(row, max, 1.0).ln() } else { 0.0 };
    let choice = |token: usize, logit: f32| Choice {
        token: token as Token,
        argmax: argmax as Token,
        logprob: if request.logprob { logit - log_sum } else { 0.0 },
    };

    // Below, the inverse is not finite.
    let greedy = config.temperature < f32::MIN_POSITIVE;
    let penalty = config.repetition_penalty;
    let penalized = penalty > 1.0 && !request.history.is_empty();
    if greedy && !penalized && !masks.hides(request.mask, argmax) {
        return Some(choice(argmax, max));
    }

    scratch.penalized.clear();
    if penalized {
        penalize(row, penalty, request.history, scratch);
    }
    masks.apply(request.mask, row, &mut scratch.block_max);
    let best = scan::argmax(row, &scratch.block_max).filter(|&best| row[best].is_finite())?;
    let token = if greedy { best } else { draw(row, best, request, scratch) };
    let raw = scratch.penalized.iter().find(|(penalized, _)| *penalized as usize == token);
    Some(choice(token, raw.map_or(row[token], |(_, logit)| *logit)))
}

/// Lowers the logits of the last tokens, each once, and notes what they were.
fn penalize(row: &mut [f32], penalty: f32, history: &[Token], scratch: &mut Scratch) {
    for &token in &history[history.len().saturating_sub(PENALTY_WINDOW)..] {
        if scratch.penalized.iter().all(|(seen, _)| *seen != token) {
            let logit = row[token as usize];
            scratch.penalized.push((token, logit));
            let lowered = if logit > 0.0 { logit / penalty } else { logit * penalty };
            scan::lower(row, &mut scratch.block_max, token as usize, lowered);
        }
    }
}

/// Draws from the tokens that temperature, top-k, min-p and top-p leave. `best` is the row's highest.
fn draw(row: &[f32], best: usize, request: &Request<'_>, scratch: &mut Scratch) -> usize {
    let config = request.config;
    let max = row[best];
    let inverse_temperature = 1.0 / config.temperature;
    let uniform = uniform(request.seed, request.history.len());
    // A token below this is less likely than `min_p` of the best one. Temperature keeps the order, so that it, top-k and
    // min-p can be asked for in one go.
    let min_p =
        if config.min_p > 0.0 { max + config.min_p.ln() * config.temperature } else { f32::NEG_INFINITY };
    let top_k = config.top_k as usize;

    let Scratch { block_max, order, candidates, .. } = scratch;
    let mut whole_row = false;
    if top_k > 0 && top_k < row.len() {
        let floor = scan::kth_floor(row, block_max, top_k, order).max(min_p);
        gather(row, block_max, floor, candidates);
    } else if min_p > f32::NEG_INFINITY {
        gather(row, block_max, min_p, candidates);
    } else if config.top_p < 1.0 {
        gather_mass(row, block_max, max, config, candidates);
        whole_row = true;
    } else {
        return draw_from_all(row, max, inverse_temperature, uniform).unwrap_or(best);
    }

    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, by_rank);
        candidates.truncate(top_k);
    }
    if candidates.len() <= FIRST_ORDERED {
        candidates.sort_unstable_by(by_rank);
    }
    let mut total = 0.0;
    for candidate in candidates.iter_mut() {
        candidate.weight = ((candidate.logit - max) * inverse_temperature).exp();
        total += candidate.weight;
    }
    if config.top_p < 1.0 {
        let all = if whole_row { scan::sum_exp(row, max, inverse_temperature) } else { total };
        let mass = config.top_p * all;
        let (kept, sum) = order_until(candidates, |sum| sum >= mass);
        candidates.truncate(kept);
        total = sum;
    }
    let drawn = uniform * total;
    let (reached, _) = order_until(candidates, |sum| sum > drawn);
    candidates[..reached].last().map_or(best, |candidate| candidate.token as usize)
}

/// Candidates that are put in order at once, at least: often all, or enough of them.
const FIRST_ORDERED: usize = 256;

/// The likeliest first. Equal logits are ordered by token, so that the result never depends on how they were found.
fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// Puts the first candidates in order, until what they weigh together is `enough`, or all. Returns how many, and their weight.
fn order_until(candidates: &mut [Candidate], enough: impl Fn(f32) -> bool) -> (usize, f32) {
    let (mut ordered, mut sum, mut more) = (0, 0.0, FIRST_ORDERED);
    while ordered < candidates.len() {
        let rest = &mut candidates[ordered..];
        more = more.min(rest.len());
        if more < rest.len() {
            rest.select_nth_unstable_by(more - 1, by_rank);
        }
        rest[..more].sort_unstable_by(by_rank);
        for candidate in &rest[..more] {
            ordered += 1;
            sum += candidate.weight;
            if enough(sum) {
                return (ordered, sum);
            }
        }
        more *= 4;
    }
    (ordered, sum)
}

/// All tokens of `row` at `floor` and above.
fn gather(row: &[f32], block_max: &[f32], floor: f32, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    for (block, _) in
        block_max.iter().enumerate().filter(|(_, max)| **max >= floor && **max > f32::NEG_INFINITY)
    {
        let start = block * BLOCK;
        for (offset, &logit) in row[start..row.len().min(start + BLOCK)].iter().enumerate() {
            if logit >= floor && logit > f32::NEG_INFINITY {
                candidates.push(Candidate { token: (start + offset) as Token, logit, weight: 0.0 });
            }
        }
    }
}

/// The tokens that hold `top_p` of the probability, and some more: it lowers the floor until they do.
fn gather_mass(
    row: &[f32],
    block_max: &[f32],
    max: f32,
    config: &SamplingConfig,
    candidates: &mut Vec<Candidate>,
) {
    let inverse_temperature = 1.0 / config.temperature;
    let wanted = config.top_p * scan::sum_exp(row, max, inverse_temperature);
    for depth in [3.0, 6.0, 9.0, 12.0, 16.0] {
        gather(row, block_max, max - depth * config.temperature, candidates);
        let mass: f32 =
            candidates.iter().map(|candidate| ((candidate.logit - max) * inverse_temperature).exp()).sum();
        if mass >= wanted {
            return;
        }
    }
    gather(row, block_max, f32::NEG_INFINITY, candidates);
}

/// Draws from the whole row, in the order of the tokens.
fn draw_from_all(row: &[f32], max: f32, inverse_temperature: f32, uniform: f32) -> Option<usize> {
    let mut left = uniform * scan::sum_exp(row, max, inverse_temperature);
    for (block, logits) in row.chunks(BLOCK).enumerate() {
        let weight = scan::sum_exp(logits, max, inverse_temperature);
        if left >= weight {
            left -= weight;
            continue;
        }
        for (offset, &logit) in logits.iter().enumerate() {
            left -= scan::exp((logit - max) * inverse_temperature);
            if left < 0.0 {
                return Some(block * BLOCK + offset);
            }
        }
    }
    None
}

/// A completion's seed: the configured one, or a random one.
pub(crate) fn completion_seed(configured: u32) -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    match configured {
        0 => RandomState::new().build_hasher().finish() | 1,
        seed => u64::from(seed),
    }
}

/// The `index`-th number of the stream of `seed`, at least 0 and below 1. The stream is `SplitMix64` (Steele, Lea and
/// Flood, 2014), whose state is a counter.
fn uniform(seed: u64, index: usize) -> f32 {
    let mut x = seed.wrapping_add((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    (x >> 40) as f32 / (1_u64 << 24) as f32
}

#[cfg(test)]
mod tests;
