//! Somebody types: ten keystrokes, each a prompt one character longer, eight tokens wanted. Cold, the sequence forgets
//! everything before each keystroke; with reuse, it keeps what the prompt has in common with what it holds.

use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::latency::{Latency, median};
use crate::raw::Token;
use crate::report::Outcome;
use crate::scenarios::engine_hosts::{SequenceHost, load, tokenize};
use crate::scenarios::hosts::Host;
use crate::settings::Settings;

/// What is typed, a character a keystroke.
const TYPED: &str = "The quick ";
/// Tokens wanted after each keystroke.
const WANTED: u32 = 8;

/// Latencies of one way to do it, a keystroke each.
#[derive(Default)]
struct Session {
    first: Vec<Duration>,
    last: Vec<Duration>,
    decoded: usize,
}

pub(super) fn run(settings: &Settings) -> Result<Outcome, BenchError> {
    let engine = load(settings)?;
    let (text, _) = Settings::sentences(settings.prompt_tokens, |text| tokenize(&engine, text))?;
    let prompts = (1..=TYPED.len())
        .map(|typed| tokenize(&engine, &format!("{text}{}", &TYPED[..typed])))
        .collect::<Result<Vec<_>, _>>()?;
    let mut host = SequenceHost::new(&engine, settings, &[], 0, WANTED)?;
    // The first prompt is decoded before, unmeasured, for both: the app was open when the typing began.
    let mut held = Vec::new();
    let started = Instant::now();
    let (mut cold, mut reuse) = (Session::default(), Session::default());
    keystroke(&mut host, &mut held, &prompts[0], 0, &mut Session::default())?;
    for prompt in &prompts {
        keystroke(&mut host, &mut held, prompt, 0, &mut cold)?;
    }
    keystroke(&mut host, &mut held, &prompts[0], 0, &mut Session::default())?;
    for prompt in &prompts {
        // At least one token must be decoded anew: the seed sample needs its logits.
        let common = held.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(prompt.len() - 1);
        keystroke(&mut host, &mut held, prompt, common, &mut reuse)?;
    }
    let milliseconds = |durations: &[Duration]| 1e3 * median(durations).as_secs_f64();
    Ok(Outcome {
        elapsed: started.elapsed(),
        samples: 2 * (prompts.len() + 1) * WANTED as usize,
        figures: vec![
            ("keystrokes", prompts.len() as f64),
            ("tokens_a_keystroke", f64::from(WANTED)),
            ("cold_keystroke_ms", milliseconds(&cold.last)),
            ("reuse_keystroke_ms", milliseconds(&reuse.last)),
            ("cold_decoded_prompt_tokens", cold.decoded as f64),
            ("reuse_decoded_prompt_tokens", reuse.decoded as f64),
        ],
        latencies: vec![
            ("cold_first_token", Latency::each(cold.first)),
            ("cold_last_token", Latency::each(cold.last)),
            ("reuse_first_token", Latency::each(reuse.first)),
            ("reuse_last_token", Latency::each(reuse.last)),
        ],
        tokens: Vec::new(),
    })
}

/// `held` is what the sequence holds, before and after; of that, `keep` positions are not decoded again.
fn keystroke(
    host: &mut SequenceHost<'_>,
    held: &mut Vec<Token>,
    prompt: &[Token],
    keep: usize,
    session: &mut Session,
) -> Result<(), BenchError> {
    let pressed = Instant::now();
    let mut keep = keep;
    if host.sequence.trim(keep as u32).is_err() {
        // A memory that cannot go back there begins anew, as a host would.
        keep = 0;
        host.trim()?;
    }
    let rest = &prompt[keep..];
    host.sequence.decode_prompt(rest, keep as u32).map_err(BenchError::engine("decode_prompt"))?;
    held.clear();
    held.extend(prompt);
    for sample in 0..WANTED {
        let token = host.next()?;
        if sample == 0 {
            session.first.push(pressed.elapsed());
        }
        // The last sample is handed over without having been decoded.
        if sample + 1 < WANTED {
            held.push(token);
        }
    }
    session.last.push(pressed.elapsed());
    session.decoded += rest.len();
    Ok(())
}
