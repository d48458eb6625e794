//! `choose` against a plain reference, over random rows.

use super::*;
use crate::random::{Random, replayable, seeds};

const SEED: &str = "ENGINE_SAMPLING_SEED";

/// The rounding of f32 sums that a comparison with f64 has to allow for.
const TOLERANCE: f64 = 2e-5;

fn no_masks(vocabulary: usize) -> Masks {
    Masks::new(vocabulary as u32, |_, _| (false, false))
}

/// About one token in ten on each list.
fn some_masks(vocabulary: usize, random: &mut Random) -> Masks {
    Masks::new(vocabulary as u32, |_, piece| {
        piece.extend_from_slice(match random.below(10) {
            0 => b" a",
            1 => b"a\n",
            _ => b"a",
        });
        (random.once_in(50), random.once_in(10))
    })
}

/// Rows as models make them, and as they should not: with ties, holes and without a finite value.
fn random_row(random: &mut Random, vocabulary: usize) -> Vec<f32> {
    let spread = [0.5, 4.0, 30.0][random.below(3) as usize];
    let kind = random.below(8);
    (0..vocabulary)
        .map(|_| {
            let bell = (0..4).map(|_| random.unit() - 0.5).sum::<f32>() * spread;
            match kind {
                // Without a negative zero, which some orders tell from the other.
                0 => (bell * 2.0).round() / 2.0 + 0.0,
                1 if random.once_in(3) => f32::NEG_INFINITY,
                2 if random.once_in(5) => f32::NAN,
                3 => 1.25,
                _ => bell,
            }
        })
        .collect()
}

fn random_config(random: &mut Random) -> SamplingConfig {
    SamplingConfig {
        temperature: if random.once_in(4) { 0.0 } else { 0.1 + 2.0 * random.unit() },
        top_k: if random.once_in(3) { 0 } else { random.below(200) },
        top_p: if random.once_in(3) { 1.0 } else { random.unit().max(1e-6) },
        min_p: if random.once_in(2) { 0.0 } else { random.unit() * random.unit() },
        repetition_penalty: if random.once_in(3) { 1.0 } else { 1.0 + random.unit() },
        single_line: random.once_in(2),
        ..SamplingConfig::default()
    }
}

/// What the reference makes of a row.
struct Naive {
    /// The most likely token of the raw row.
    argmax: usize,
    /// Logits after penalty and masks.
    row: Vec<f64>,
    raw: Vec<f64>,
    /// Tokens by falling logit, those alike by number. Only those that may be chosen.
    order: Vec<usize>,
}

impl Naive {
    fn new(row: &[f32], request: &Request<'_>, masks: &Masks) -> Option<Self> {
        let raw: Vec<f64> =
            row.iter().map(|&logit| if logit.is_nan() { f64::NEG_INFINITY } else { logit.into() }).collect();
        let by_logit = |row: &[f64]| {
            let mut order: Vec<usize> = (0..row.len()).filter(|&token| row[token].is_finite()).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            order
        };
        let argmax = *by_logit(&raw).first()?;
        let mut row: Vec<f64> = raw.clone();
        let penalty = f64::from(request.config.repetition_penalty);
        let recent = request.history.iter().rev().take(64).collect::<std::collections::HashSet<_>>();
        for &&token in recent.iter().filter(|_| penalty > 1.0) {
            let logit = &mut row[token as usize];
            // To what an f32 holds, so that ties are the same ones.
            *logit = f64::from((if *logit > 0.0 { *logit / penalty } else { *logit * penalty }) as f32);
        }
        for (token, logit) in row.iter_mut().enumerate() {
            if masks.hides(request.mask, token) {
                *logit = f64::NEG_INFINITY;
            }
        }
        let order = by_logit(&row);
        (!order.is_empty()).then_some(Self { argmax, row, raw, order })
    }

    fn weight(&self, token: usize, temperature: f64) -> f64 {
        ((self.row[token] - self.row[self.order[0]]) / temperature).exp()
    }

    /// The tokens that may be drawn, in the order of their logits; `slack` widens (or narrows) min-p and top-p.
    fn kept(&self, config: &SamplingConfig, slack: f64) -> Vec<usize> {
        let temperature = f64::from(config.temperature);
        let mut kept = self.order.clone();
        if config.top_k > 0 {
            kept.truncate(config.top_k as usize);
        }
        let min_p = f64::from(config.min_p) * (1.0 - slack * 10.0);
        kept.retain(|&token| self.weight(token, temperature) >= min_p);
        if config.top_p < 1.0 {
            let total: f64 = kept.iter().map(|&token| self.weight(token, temperature)).sum();
            let mass = (f64::from(config.top_p) + slack) * total;
            let mut sum = 0.0;
            let mut count = 0;
            for &token in &kept {
                if count > 0 && sum >= mass {
                    break;
                }
                sum += self.weight(token, temperature);
                count += 1;
            }
            kept.truncate(count);
        }
        kept
    }

    fn log_probability(&self, token: usize) -> f64 {
        let max = self.raw[self.argmax];
        let sum: f64 = self.raw.iter().map(|logit| (logit - max).exp()).sum();
        self.raw[token] - max - sum.ln()
    }
}

/// The tokens that the last draw chose among, which puts only those in order that it needs; `None`: the whole row.
fn candidates(config: &SamplingConfig, vocabulary: usize, scratch: &Scratch) -> Option<Vec<usize>> {
    let bounded = (config.top_k > 0 && (config.top_k as usize) < vocabulary)
        || config.min_p > 0.0
        || config.top_p < 1.0;
    let mut candidates = scratch.candidates.clone();
    candidates.sort_unstable_by(by_rank);
    bounded.then(|| candidates.iter().map(|candidate| candidate.token as usize).collect())
}

fn compare(row: &[f32], request: &Request<'_>, masks: &Masks) {
    let mut changed = row.to_vec();
    let mut scratch = Scratch::default();
    let choice = choose(&mut changed, request, masks, &mut scratch);
    let mut again = row.to_vec();
    assert_eq!(choose(&mut again, request, masks, &mut Scratch::default()), choice, "it is deterministic");
    let Some(naive) = Naive::new(row, request, masks) else {
        assert_eq!(choice, None);
        return;
    };
    let choice = choice.expect("there is a token to choose");
    let token = choice.token as usize;
    assert_eq!(choice.argmax as usize, naive.argmax);
    let logprob = if request.logprob { naive.log_probability(token) } else { 0.0 };
    let off = (f64::from(choice.logprob) - logprob).abs();
    assert!(off <= 1e-5 * (1.0 + logprob.abs()), "log-probability {logprob}, not {}", choice.logprob);

    let config = request.config;
    if config.temperature <= 0.0 {
        assert_eq!(token, naive.order[0], "greedy");
        return;
    }
    let kept = candidates(config, row.len(), &scratch).unwrap_or_else(|| naive.order.clone());
    let (least, most) = (naive.kept(config, -TOLERANCE), naive.kept(config, TOLERANCE));
    assert!(least.len() <= kept.len() && kept.len() <= most.len(), "{} of {least:?} to {most:?}", kept.len());
    assert_eq!(kept, most[..kept.len()], "the most likely ones, in order");
    // The draw goes along the kept tokens, or along the whole row as it is.
    let whole = candidates(config, row.len(), &scratch).is_none();
    let line = if whole { (0..row.len()).collect() } else { kept };
    let temperature = f64::from(config.temperature);
    let weights: Vec<f64> = line.iter().map(|&token| naive.weight(token, temperature)).collect();
    let total: f64 = weights.iter().sum();
    let at = line.iter().position(|&other| other == token).expect("a token that was kept");
    let before = weights[..at].iter().sum::<f64>() / total;
    let drawn = f64::from(uniform(request.seed, request.history.len()));
    let hit = before - TOLERANCE <= drawn && drawn <= before + weights[at] / total + TOLERANCE;
    assert!(hit, "{drawn} is not in {before} to {}", before + weights[at] / total);
}

#[test]
fn choices_are_those_of_the_reference() {
    for seed in seeds(SEED, 3000) {
        replayable(SEED, seed, |seed| {
            let random = &mut Random(seed);
            let largest = [10, 300, 5000][random.below(3) as usize];
            let vocabulary = 1 + random.below(largest) as usize;
            let masks = if random.once_in(3) { no_masks(vocabulary) } else { some_masks(vocabulary, random) };
            let config = random_config(random);
            let row = random_row(random, vocabulary);
            let length = random.below(150);
            // From few tokens, so that many come again.
            let few = 1 + random.below(vocabulary as u32);
            let history: Vec<Token> = (0..length).map(|_| random.below(few) as Token).collect();
            let request = Request {
                config: &config,
                seed: 1 + random.next() / 2,
                history: &history,
                mask: Mask { single_line: config.single_line, word_continuation: random.once_in(3) },
                logprob: random.once_in(2),
            };
            compare(&row, &request, &masks);
        });
    }
}

fn request<'a>(config: &'a SamplingConfig, history: &'a [Token]) -> Request<'a> {
    Request { config, seed: 1, history, mask: Mask::default(), logprob: true }
}

fn config(temperature: f32, top_k: u32, top_p: f32, min_p: f32) -> SamplingConfig {
    SamplingConfig { temperature, top_k, top_p, min_p, ..SamplingConfig::default() }
}

fn chosen(row: &[f32], request: &Request<'_>) -> Option<Choice> {
    choose(&mut row.to_vec(), request, &no_masks(row.len()), &mut Scratch::default())
}

#[test]
fn a_row_without_a_finite_value_gives_no_token() {
    for config in [config(0.0, 0, 1.0, 0.0), config(1.0, 0, 1.0, 0.0), config(1.0, 2, 0.9, 0.1)] {
        for value in [f32::NAN, f32::NEG_INFINITY, f32::INFINITY] {
            for length in [1, 127, 128, 300] {
                assert_eq!(chosen(&vec![value; length], &request(&config, &[])), None, "{value}");
            }
        }
        let masks = Masks::new(5, |_, _| (false, true));
        let all = choose(&mut [1.0; 5], &request(&config, &[]), &masks, &mut Scratch::default());
        assert_eq!(all, None, "all masked");
    }
}

#[test]
fn numbers_beside_nan_are_drawn_by_their_weight() {
    // Equal weights for 200 tokens, and a NaN in each block.
    let mut row = vec![0.0; 200];
    (row[0], row[130]) = (f32::NAN, f32::NAN);
    let config = config(1.0, 0, 1.0, 0.0);
    let mut seen = std::collections::HashSet::new();
    for seed in 1..2000 {
        let request = Request { seed, ..request(&config, &[]) };
        let choice = chosen(&row, &request).expect("there are numbers");
        assert!(!row[choice.token as usize].is_nan());
        seen.insert(choice.token);
    }
    assert!(seen.len() > 190, "{} of 198 tokens", seen.len());
}

#[test]
fn the_coldest_temperature_is_greedy() {
    for temperature in [f32::MIN_POSITIVE, f32::MIN_POSITIVE / 8.0, f32::from_bits(1), 1e-20] {
        for config in [
            config(temperature, 0, 1.0, 0.0),
            config(temperature, 3, 1.0, 0.0),
            config(temperature, 0, 0.5, 0.0),
        ] {
            let choice = chosen(&[1.0, 5.0, 4.9, -3.0], &request(&config, &[])).expect("a token");
            assert_eq!(choice.token, 1, "{temperature:e}");
        }
    }
}

#[test]
fn a_penalty_counts_once_a_token_and_looks_back_64_tokens() {
    let config = SamplingConfig { repetition_penalty: 2.0, ..SamplingConfig::greedy() };
    let row = [3.0, 2.0, 1.0, -1.0];
    let token = |history: &[Token]| chosen(&row, &request(&config, history)).expect("a token").token;
    assert_eq!(token(&[]), 0);
    assert_eq!(token(&[0]), 1);
    // Once: twice would take token 1 to 0.5, below token 2.
    assert_eq!(token(&[0, 1, 1]), 0, "3 / 2 is more than 2 / 2 and 1");
    let long = |first: Token| [vec![first], vec![3; 63]].concat();
    assert_eq!(token(&long(0)), 1, "the 64th from the end counts");
    assert_eq!(token(&[long(0), vec![3]].concat()), 0, "the 65th does not");
}

#[test]
fn the_log_probability_is_of_the_raw_row() {
    let config = SamplingConfig { repetition_penalty: 100.0, ..SamplingConfig::greedy() };
    let row = [2.0_f32, 1.0, 0.0];
    let sum: f32 = row.iter().map(|logit| logit.exp()).sum();
    // All are lowered: 0.02, 0.01 and 0.
    let choice = chosen(&row, &request(&config, &[0, 1, 2])).expect("a token");
    assert_eq!((choice.token, choice.argmax), (0, 0));
    assert!((choice.logprob - (2.0 - sum.ln())).abs() < 1e-6, "{}", choice.logprob);
    // The best of the raw row is not what is chosen.
    let choice = chosen(&row, &request(&config, &[0])).expect("a token");
    assert_eq!((choice.token, choice.argmax), (1, 0));
    assert!((choice.logprob - (1.0 - sum.ln())).abs() < 1e-6, "{}", choice.logprob);
}

#[test]
fn draws_have_the_distribution_of_the_row() {
    let row: Vec<f32> =
        (0..300).map(|token| if token % 30 == 0 { 2.0 - token as f32 / 100.0 } else { -9.0 }).collect();
    for config in [
        config(1.0, 0, 1.0, 0.0),
        config(0.7, 10, 1.0, 0.0),
        config(1.5, 0, 0.98, 0.0),
        config(1.0, 0, 1.0, 0.05),
    ] {
        let masks = no_masks(row.len());
        let naive = Naive::new(&row, &request(&config, &[]), &masks).expect("finite");
        let kept = naive.kept(&config, 0.0);
        let weight = |&token: &usize| naive.weight(token, config.temperature.into());
        let total: f64 = kept.iter().map(weight).sum();
        let draws = 20_000;
        let mut counts = vec![0_u32; row.len()];
        for seed in 1..=draws {
            let request = Request { seed, logprob: false, ..request(&config, &[]) };
            counts[chosen(&row, &request).expect("finite").token as usize] += 1;
        }
        // The likely ones in a class each, the others in one. 99.9 % of all streams give less than 31.3 for 11 classes.
        let (mut chi_square, mut classes) = (0.0, 0);
        let (mut rest, mut rest_seen) = (0.0, 0);
        for token in &kept {
            let expected = weight(token) / total * draws as f64;
            if expected > 100.0 {
                chi_square += (f64::from(counts[*token]) - expected).powi(2) / expected;
                classes += 1;
            } else {
                rest += expected;
                rest_seen += counts[*token];
            }
        }
        chi_square += (f64::from(rest_seen) - rest).powi(2) / rest.max(1.0);
        assert!(classes >= 8 && chi_square < 31.3, "{config:?}: {chi_square} in {classes} classes");
        let outside: u32 =
            (0..row.len()).filter(|token| !kept.contains(token)).map(|token| counts[token]).sum();
        assert_eq!(outside, 0, "{config:?}");
    }
}

#[test]
fn a_large_vocabulary_needs_no_top_k() {
    let vocabulary = 262_144;
    let masks = no_masks(vocabulary);
    for (seed, flat) in [(1, false), (2, false), (3, true)] {
        let random = &mut Random(seed);
        let row: Vec<f32> = (0..vocabulary).map(|_| if flat { 0.5 } else { random.unit() * 20.0 }).collect();
        for top_p in [1.0, 0.9, 1e-9] {
            for min_p in [0.0, 0.05] {
                let config = config(0.8, 0, top_p, min_p);
                compare(&row, &Request { seed: 10 + seed, ..request(&config, &[5, 6]) }, &masks);
            }
        }
    }
}

#[test]
fn the_smallest_top_p_keeps_one() {
    let row: Vec<f32> = (0..1000).map(|token| (token % 97) as f32 / 50.0).collect();
    for top_p in [f32::MIN_POSITIVE, 0.0, -1.0] {
        for (top_k, min_p) in [(0, 0.0), (40, 0.0), (0, 0.1)] {
            let config = config(2.0, top_k, top_p, min_p);
            for seed in 1..50 {
                let choice = chosen(&row, &Request { seed, ..request(&config, &[]) }).expect("finite");
                assert_eq!(choice.token, 96, "the first of the best");
            }
        }
    }
}

#[test]
fn the_random_stream_is_what_it_was() {
    // SplitMix64 with the seed 1234567, as published for it: 6457827717110365317, 3203168211198807973, ...
    let first: Vec<u32> =
        (0..3).map(|index| (uniform(1_234_567, index) * (1_u32 << 24) as f32) as u32).collect();
    let published = [6_457_827_717_110_365_317_u64, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
    assert_eq!(first, published.map(|value| (value >> 40) as u32));
    for seed in [1, 7, u64::MAX] {
        let mean = (0..10_000)
            .map(|index| uniform(seed, index))
            .inspect(|value| assert!((0.0..1.0).contains(value)));
        let mean = mean.sum::<f32>() / 10_000.0;
        assert!((0.48..0.52).contains(&mean), "{mean}");
    }
}

#[test]
fn several_threads_choose_what_one_does() {
    let (rows, vocabulary) = (16, 50_021);
    assert!(rows * vocabulary >= MIN_SHARED_WORK);
    let random = &mut Random(5);
    let logits: Vec<f32> = (0..rows * vocabulary).map(|_| random.unit() * 12.0).collect();
    let configs: Vec<_> = (0..rows).map(|_| random_config(random)).collect();
    let history: Vec<Token> = (0..40).map(|_| random.below(vocabulary as u32) as Token).collect();
    let masks = some_masks(vocabulary, random);
    let request =
        |row: usize| Request { seed: 1 + row as u64, ..request(&configs[row], &history[..row * 2]) };
    let mut serial = Sampler::new(rows);
    let expected = serial.sample(&mut logits.clone(), vocabulary, request, &masks).to_vec();
    let alone: Vec<_> = (0..rows)
        .map(|row| {
            let mut logits = logits[row * vocabulary..(row + 1) * vocabulary].to_vec();
            choose(&mut logits, &request(row), &masks, &mut Scratch::default())
        })
        .collect();
    assert_eq!(expected, alone);
    pool(4).expect("there are threads").install(|| {
        let mut parallel = Sampler::new(rows);
        for _ in 0..5 {
            assert_eq!(parallel.sample(&mut logits.clone(), vocabulary, request, &masks), expected);
        }
        // Fewer rows than it was made for.
        let few = parallel.sample(&mut logits[..2 * vocabulary].to_vec(), vocabulary, request, &masks);
        assert_eq!(few, &expected[..2]);
    });
}
