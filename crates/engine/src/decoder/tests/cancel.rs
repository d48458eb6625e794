//! Cancelling: at once, and nobody else.

use std::time::{Duration, Instant};

use super::{Options, Rig, expected, in_time, take};
use crate::error::{PromptError, SampleError};
use crate::model::Token;
use crate::protocol::Reply;
use crate::sequence::Event;

const PROMPT: [Token; 3] = [1, 5, 9];
const OTHER: [Token; 4] = [2, 4, 8, 16];
/// Far less than a closed gate takes, far more than waking a thread does.
const SOON: Duration = Duration::from_secs(5);

#[test]
fn sample_next_returns_while_the_step_is_under_way() {
    in_time(|| {
        for run_ahead in [0, 4] {
            let rig = Rig::new(&Options { run_ahead, rolls_back: true, ..Options::default() });
            let mut neighbour = rig.prompted(&OTHER);
            let mut sequence = rig.prompted(&PROMPT);
            take(&mut sequence, 1);
            take(&mut neighbour, 1);
            // Steps to come: what is sampled ahead, then one that waits. It has rows of both, so that none is broken off.
            rig.script.close_after(0);
            neighbour.ask(9).expect("the queue has room");
            let before = rig.script.calls();
            let canceller = sequence.canceller();
            let host = std::thread::spawn(move || {
                let mut tokens = Vec::new();
                let error = loop {
                    match sequence.sample_next() {
                        Ok(sample) => tokens.push(sample.token),
                        Err(error) => break error,
                    }
                };
                (sequence, tokens, error)
            });
            rig.script.wait_for_calls(before.max(3));
            std::thread::sleep(Duration::from_millis(5));
            let since = Instant::now();
            canceller.cancel();
            let (mut sequence, tokens, error) = host.join().expect("the host ends");
            assert!(since.elapsed() < SOON, "it waited for the step");
            assert_eq!(error, SampleError::Cancelled);
            assert_eq!(tokens, expected(&PROMPT, 1 + tokens.len())[1..]);
            rig.script.open();
            assert_eq!(take(&mut neighbour, 9), expected(&OTHER, 10)[1..], "the neighbour's tokens");
            // A trim brings it back to where it was.
            sequence.trim(PROMPT.len() as u32).expect("a trim is possible");
            assert!(!canceller.is_cancelled());
            sequence.decode_prompt(&[6], PROMPT.len() as u32).expect("it works again");
            assert_eq!(take(&mut sequence, 5), expected(&[1, 5, 9, 6], 5));
        }
    });
}

#[test]
fn a_prompt_stops_within_its_chunk() {
    in_time(|| {
        let rig = Rig::new(&Options::default());
        let mut neighbour = rig.prompted(&OTHER);
        let mut sequence = rig.greedy();
        let canceller = sequence.canceller();
        let before = rig.script.calls();
        rig.script.close_after(1);
        let host = std::thread::spawn(move || {
            let prompt: Vec<Token> = (12..52).collect();
            (sequence.decode_prompt(&prompt, 0), sequence)
        });
        // The first chunk is through, the second waits.
        rig.script.wait_for_calls(before + 2);
        canceller.cancel();
        let (result, mut sequence) = host.join().expect("the host ends");
        assert_eq!(result, Err(PromptError::Cancelled));
        // The backend is asked to give up, so this does not wait for the gate. The memory says what is there.
        assert_eq!(sequence.position_count(), 16);
        // And nothing of it is tried again.
        let calls = rig.script.calls();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(rig.script.calls(), calls);
        assert_eq!(sequence.decode_prompt(&[1], 16), Err(PromptError::Cancelled), "until it is trimmed");
        sequence.trim(10).expect("a trim is possible");
        rig.script.open();
        sequence.decode_prompt(&(22..52).collect::<Vec<_>>(), 10).expect("it works again");
        assert_eq!(take(&mut sequence, 3), expected(&(12..52).collect::<Vec<_>>(), 3));
        assert_eq!(take(&mut neighbour, 5), expected(&OTHER, 5));
        assert_eq!(rig.script.steps().iter().filter(|rows| rows.len() > 16).count(), 0);
    });
}

#[test]
fn after_a_cancel_nothing_is_decoded() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: 0, ..Options::default() });
        let mut sequence = rig.prompted(&PROMPT);
        take(&mut sequence, 3);
        let calls = rig.script.calls();
        sequence.cancel();
        for _ in 0..3 {
            assert_eq!(sequence.sample_next(), Err(SampleError::Cancelled));
        }
        assert_eq!(sequence.decode_prompt(&[1], 5), Err(PromptError::Cancelled));
        assert_eq!(sequence.position_count(), 5, "a cancel forgets nothing that the host has");
        assert_eq!(rig.script.calls(), calls);
    });
}

#[test]
fn what_was_sampled_ahead_is_given_up() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: 8, ..Options::default() });
        let mut sequence = rig.prompted(&PROMPT);
        take(&mut sequence, 2);
        // A seed, a token that was asked for, and eight ahead.
        while rig.metrics().sampled < 10 {
            std::thread::yield_now();
        }
        sequence.cancel();
        sequence.trim(u32::MAX).expect("a trim is possible");
        assert_eq!(sequence.position_count(), 4);
        assert_eq!((rig.metrics().sampled, rig.metrics().discarded), (10, 8));
    });
}

#[test]
fn a_new_prompt_replaces_the_one_in_flight() {
    in_time(|| {
        let rig = Rig::new(&Options { max_sequences: 1, ..Options::default() });
        let mut sequence = rig.greedy();
        for key in 0..20 {
            // As a text field does at each keystroke: cancel, trim to what is still right, prompt.
            let canceller = sequence.canceller();
            let before = rig.script.calls();
            rig.script.close_after(0);
            let host = std::thread::spawn(move || {
                let prompt: Vec<Token> = (12..44).collect();
                let start = sequence.position_count();
                let result = sequence.decode_prompt(&prompt[start as usize..], start);
                (result, sequence)
            });
            rig.script.wait_for_calls(before + 1);
            canceller.cancel();
            let (result, back) = host.join().expect("the host ends");
            assert_eq!(result, Err(PromptError::Cancelled));
            sequence = back;
            sequence.trim(key % 4).expect("a trim is possible");
            rig.script.open();
        }
        let held = sequence.position_count();
        let prompt: Vec<Token> = (12..44).collect();
        sequence.decode_prompt(&prompt[held as usize..], held).expect("the last one counts");
        assert_eq!(take(&mut sequence, 5), expected(&prompt, 5));
    });
}

#[test]
fn a_cancel_at_any_moment_says_cancelled_and_nothing_else() {
    in_time(|| {
        let rig = Rig::new(&Options::default());
        let mut neighbour = rig.prompted(&OTHER);
        let mut sequence = rig.prompted(&PROMPT);
        let expected = expected(&PROMPT, 200);
        for round in 0..400_u64 {
            let canceller = sequence.canceller();
            let thread = std::thread::spawn(move || {
                for _ in 0..(round * 37) % 1500 {
                    std::hint::spin_loop();
                }
                canceller.cancel();
            });
            let mut count = 0;
            let error = loop {
                match sequence.sample_next() {
                    Ok(sample) => assert_eq!(sample.token, expected[count]),
                    Err(error) => break error,
                }
                count += 1;
                if count == expected.len() {
                    sequence.cancel();
                }
            };
            assert_eq!(error, SampleError::Cancelled, "round {round}");
            thread.join().expect("it cancels");
            assert_eq!(sequence.position_count(), (3 + count.max(1) - 1) as u32, "round {round}");
            sequence.trim(0).expect("a trim is possible");
            sequence.decode_prompt(&PROMPT, 0).expect("it works again");
        }
        assert_eq!(take(&mut neighbour, 20), super::expected(&OTHER, 20));
    });
}

#[test]
fn an_answer_to_an_ask_that_came_after_the_cancel_says_cancelled() {
    in_time(|| {
        let rig = Rig::new(&Options::default());
        let sequence = rig.prompted(&PROMPT);
        // The decoder has seen the flag, so that it has nothing to go on from; the host is not woken yet.
        let answer = |error| Reply::SampleFailed { epoch: 1, error };
        let event = sequence.event_of(answer(SampleError::NoPrompt));
        assert!(matches!(event, Some(Event::Sample(Err(SampleError::NoPrompt)))));
        sequence.cancel();
        let event = sequence.event_of(answer(SampleError::NoPrompt));
        assert!(matches!(event, Some(Event::Sample(Err(SampleError::Cancelled)))));
    });
}
