//! Creating, destroying, queues and shutting down.

use std::time::Duration;

use super::{Options, Rig, expected, in_time, take};
use crate::backend::scripted::Fault;
use crate::config::{MAX_RUN_AHEAD, SamplingConfig};
use crate::error::{CreateSequenceError, PromptError, SampleError, TrimError};
use crate::model::Token;

const PROMPT: [Token; 3] = [1, 5, 9];

#[test]
fn slots_are_given_back_for_ever() {
    in_time(|| {
        for max_sequences in [1, 3] {
            let rig = Rig::new(&Options { max_sequences, ..Options::default() });
            for round in 0..200 {
                let mut sequences: Vec<_> = (0..max_sequences).map(|_| rig.greedy()).collect();
                assert_eq!(
                    rig.create(SamplingConfig::greedy()).map(|_| ()),
                    Err(CreateSequenceError::NoFreeSlot { max_sequences })
                );
                let last = sequences.last_mut().expect("there is one");
                last.decode_prompt(&PROMPT, 0).expect("nothing of the last one is left");
                assert_eq!(take(last, 1 + round % 3), expected(&PROMPT, 1 + round % 3));
            }
        }
    });
}

#[test]
fn a_destroyed_sequence_leaves_nothing_to_the_next() {
    in_time(|| {
        let rig = Rig::new(&Options { max_sequences: 2, ..Options::default() });
        let mut first = rig.prompted(&[2, 4, 8, 16]);
        take(&mut first, 5);
        let id = first.id();
        drop(first);
        let mut second = rig.greedy();
        assert!(second.id() > id);
        assert_eq!(second.position_count(), 0);
        assert_eq!(second.sample_next(), Err(SampleError::NoPrompt));
        second.decode_prompt(&PROMPT, 0).expect("it begins at 0");
        assert_eq!(take(&mut second, 5), expected(&PROMPT, 5));
    });
}

#[test]
fn a_full_queue_is_an_error() {
    in_time(|| {
        let rig = Rig::new(&Options { queue_capacity: 2, run_ahead: 0, ..Options::default() });
        let [mut a, mut b] = [rig.prompted(&PROMPT), rig.prompted(&PROMPT)];
        // A second token each, so that the decoder has taken in all that was sent.
        take(&mut a, 2);
        take(&mut b, 2);
        rig.script.close_after(0);
        let before = rig.script.calls();
        a.ask(1).expect("the queue is empty");
        rig.script.wait_for_calls(before + 1);
        // The decoder is in the step, and takes nothing in.
        a.ask(1).expect("one of two");
        b.ask(1).expect("two of two");
        assert_eq!(b.ask(1), Err(SampleError::QueueFull { capacity: 2 }));
        let error = rig.create(SamplingConfig::greedy()).expect_err("the queue is full");
        assert_eq!(error, CreateSequenceError::QueueFull { capacity: 2 });
        let start = b.position_count();
        assert_eq!(b.decode_prompt(&[1], start), Err(PromptError::QueueFull { capacity: 2 }));
        rig.script.open();
        // What was refused has changed nothing: two tokens were asked for, and they come.
        rig.script.wait_for_calls(before + 2);
        assert_eq!(b.sample_next().map(|sample| sample.token), Ok(expected(&PROMPT, 3)[2]));
    });
}

#[test]
fn replies_have_room_whatever_the_host_leaves_unread() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: MAX_RUN_AHEAD, window: 256, ..Options::default() });
        let mut sequence = rig.prompted(&PROMPT);
        take(&mut sequence, 2);
        for toggle in 0..8 {
            // Each makes what was sampled ahead void, and as much is sampled again.
            let full = rig.script.calls() + u64::from(MAX_RUN_AHEAD) - 4;
            sequence.set_compute_logprob(toggle % 2 == 0);
            if toggle > 0 {
                rig.script.wait_for_calls(full);
            }
        }
        assert_eq!(take(&mut sequence, 100), expected(&PROMPT, 102)[2..]);
    });
}

#[test]
fn a_shutdown_answers_everybody() {
    for closed in [false, true] {
        in_time(move || {
            let mut rig = Rig::new(&Options { batch: 8, ..Options::default() });
            let sequences = [&[1, 5, 9][..], &[2, 4], &[6]].map(|prompt| rig.prompted(prompt));
            let mut late = rig.greedy();
            if closed {
                rig.script.close_after(0);
            }
            let mut threads: Vec<_> = sequences
                .into_iter()
                .map(|mut sequence| {
                    std::thread::spawn(move || {
                        let error = loop {
                            match sequence.sample_next() {
                                Ok(_) => {}
                                // In a full window it can go on from a trim.
                                Err(SampleError::OutOfRoom { .. }) => {
                                    if sequence.trim(0).is_err()
                                        || sequence.decode_prompt(&PROMPT, 0).is_err()
                                    {
                                        break SampleError::Shutdown;
                                    }
                                }
                                Err(error) => break error,
                            }
                        };
                        (sequence, error)
                    })
                })
                .collect();
            threads.push(std::thread::spawn(move || {
                let prompt: Vec<Token> = (12..52).cycle().take(200).collect();
                let error = loop {
                    let done = late
                        .decode_prompt(&prompt, 0)
                        .and_then(|()| late.trim(0).map_err(|_| PromptError::Shutdown));
                    if let Err(error) = done {
                        break error;
                    }
                };
                assert_eq!(error, PromptError::Shutdown);
                (late, SampleError::Shutdown)
            }));
            std::thread::sleep(Duration::from_millis(20));
            // A backend that is asked to give up does.
            rig.shut_down();
            for thread in threads {
                let (mut sequence, error) = thread.join().expect("the host ends");
                assert_eq!(error, SampleError::Shutdown);
                outlives(&rig, &mut sequence);
            }
        });
    }
}

/// Every operation on a sequence whose engine is gone says so.
fn outlives(rig: &Rig, sequence: &mut crate::Sequence) {
    let shutdown = rig.create(SamplingConfig::greedy()).map(|_| ());
    assert_eq!(shutdown, Err(CreateSequenceError::Shutdown));
    assert_eq!(sequence.sample_next(), Err(SampleError::Shutdown));
    // A full window has no room for a prompt, engine or not.
    let start = sequence.position_count().min(100);
    assert_eq!(sequence.decode_prompt(&[1], start), Err(PromptError::Shutdown));
    sequence.set_compute_logprob(true);
    assert_eq!(sequence.trim(0), Err(TrimError::Shutdown));
    assert_eq!(sequence.sample_next(), Err(SampleError::Shutdown));
    sequence.cancel();
    assert_eq!(sequence.sample_next(), Err(SampleError::Cancelled));
}

#[test]
fn a_decoder_that_panics_leaves_nobody_waiting() {
    in_time(|| {
        let rig = Rig::new(&Options::default());
        let sequences = [&[1, 5, 9][..], &[2, 4], &[6]].map(|prompt| rig.prompted(prompt));
        rig.script.fail(10, Fault::Panic);
        let threads = sequences.map(|mut sequence| {
            std::thread::spawn(move || {
                let error = loop {
                    if let Err(error) = sequence.sample_next() {
                        break error;
                    }
                };
                assert_eq!(error, SampleError::Shutdown);
                sequence
            })
        });
        for thread in threads {
            let mut sequence = thread.join().expect("the host ends");
            outlives(&rig, &mut sequence);
        }
    });
}

#[test]
fn a_prompt_hands_its_seed_over_once() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: 0, ..Options::default() });
        let mut sequence = rig.prompted(&PROMPT);
        let calls = rig.script.calls();
        assert_eq!(take(&mut sequence, 1), expected(&PROMPT, 1));
        assert_eq!(rig.script.calls(), calls, "the seed was sampled with the prompt");
        assert_eq!(sequence.position_count(), 3);
        take(&mut sequence, 1);
        assert_eq!(rig.script.calls(), calls + 1);
        assert_eq!(sequence.position_count(), 4);
    });
}

#[test]
fn a_long_prompt_leaves_a_row_in_each_step_to_the_others() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: 1, ..Options::default() });
        let mut streaming = rig.prompted(&PROMPT);
        let mut long = rig.greedy();
        let taker = std::thread::spawn(move || take(&mut streaming, 100));
        let prompt: Vec<Token> = (12..52).cycle().take(200).collect();
        long.decode_prompt(&prompt, 0).expect("it is decoded");
        assert_eq!(take(&mut long, 3), expected(&prompt, 3));
        assert_eq!(taker.join().expect("it streams"), expected(&PROMPT, 100));
        assert!(rig.script.steps().iter().all(|rows| rows.len() <= 16));
    });
}
