//! One context, one loop: a batch of a token a sequence, one decode, a sample a sequence. With the arg-max taken straight
//! from the logits it is the raw loop.

use std::time::Instant;

use crate::error::BenchError;
use crate::latency::Latency;
use crate::raw::{Context, ContextShape, Model, Row};
use crate::report::Outcome;
use crate::scenarios::{Selection, Selector, check_samples};
use crate::settings::Settings;

pub(super) fn run(model: &Model, settings: &Settings, selection: Selection) -> Result<Outcome, BenchError> {
    let sampled = !matches!(selection, Selection::Nothing);
    let (settle, timed) = (settings.settle_samples(), settings.timed_samples());
    // batched-bench times the first decode as well, where llama.cpp makes a new graph. What is to be compared with it does
    // the same, at the positions where the others' clock starts.
    let (settle, earlier) = if sampled { (settle as usize, 0) } else { (0, settle) };
    let mut context = Context::new(model, settings, ContextShape::shared(model, settings))?;
    let prompt = Settings::prompt(settings.prompt_tokens + earlier, |text| model.tokenize(text))?;
    let (mut selectors, mut tokens, mut first_token) = (Vec::new(), Vec::new(), Vec::new());
    for sequence in 0..settings.num_sequences {
        let asked = Instant::now();
        context.decode_prompt(sequence, &prompt)?;
        context.synchronize();
        let mut selector = Selector::new(selection, model, settings, sequence);
        tokens.push(vec![selector.select(&context, -1)]);
        first_token.push(asked.elapsed());
        selectors.push(selector);
    }

    let mut rows = Vec::with_capacity(tokens.len());
    let mut steps = Vec::with_capacity(settle + timed);
    let mut started = Instant::now();
    for step in 0..settle + timed {
        let step_started = Instant::now();
        if step == settle {
            started = step_started;
        }
        // The order of the sequence ids, so that neighbours share a ubatch whatever the layout.
        rows.clear();
        rows.extend(tokens.iter().enumerate().map(|(sequence, tokens)| Row {
            token: tokens[step],
            position: (prompt.len() + step) as i32,
            sequence: sequence as i32,
            logits: true,
        }));
        context.decode(&rows)?;
        // Once, since asking costs as well. Asking for logits waits by itself.
        if !sampled {
            context.synchronize();
        }
        for (row, (selector, tokens)) in selectors.iter_mut().zip(&mut tokens).enumerate() {
            tokens.push(selector.select(&context, row as i32));
        }
        steps.push(step_started.elapsed());
    }
    let elapsed = started.elapsed();
    if sampled {
        check_samples(&tokens, settings, |token| model.is_eog(token))?;
    }
    Ok(Outcome {
        elapsed,
        samples: timed * tokens.len(),
        latencies: vec![
            ("first_token", Latency::each(first_token)),
            ("step", Latency::each(steps.split_off(settle))),
        ],
        figures: vec![("mean_rows", f64::from(settings.num_sequences))],
        tokens,
    })
}
