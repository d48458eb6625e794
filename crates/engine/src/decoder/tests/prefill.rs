//! Long prompts that a second context decodes while somebody streams.

use std::time::Duration;

use super::{Options, Rig, expected, in_time, take};
use crate::backend::scripted::{Fault, Poison};
use crate::error::{DecodeError, PromptError};
use crate::model::Token;
use crate::sequence::Sequence;

const STREAM: [Token; 4] = [2, 4, 8, 16];
/// Tokens that the stream's host has asked for, a millisecond each: it is never through with them while a test runs.
const ASKED: u32 = 20_000;
const CHUNK: u32 = 8;

fn options() -> Options {
    Options { separate_chunk: CHUNK, window: 2 * ASKED, ..Options::default() }
}

fn long(length: u32) -> Vec<Token> {
    (0..length).map(|index| (index % 50) as Token).collect()
}

/// A sequence that streams.
fn streaming(rig: &Rig) -> Sequence {
    let mut stream = rig.prompted(&STREAM);
    take(&mut stream, 1);
    rig.script.slow_down(Duration::from_millis(1));
    stream.ask(ASKED).expect("the queue has room");
    stream
}

/// Rows of a slot in the steps that streams share.
fn shared_rows(rig: &Rig, slot: u32) -> usize {
    rig.script.steps().iter().flatten().filter(|row| row.slot == slot).count()
}

#[test]
fn all_but_the_last_token_is_decoded_beside_the_stream() {
    in_time(|| {
        let rig = Rig::new(&options());
        let mut stream = streaming(&rig);
        let mut other = rig.greedy();
        rig.prefill_script.close_after(2);
        let host = std::thread::spawn(move || {
            other.decode_prompt(&long(60), 0).expect("the prompt is decoded");
            other
        });
        rig.prefill_script.wait_for_calls(3);
        // The stream does not wait for it.
        rig.script.wait_for_calls(rig.script.calls() + 20);
        rig.prefill_script.open();
        let mut other = host.join().expect("the host ends");
        assert_eq!(rig.prefill_script.steps().iter().map(Vec::len).sum::<usize>(), 59);
        assert!(rig.prefill_script.steps().iter().flatten().all(|row| !row.output));
        assert_eq!(rig.metrics().separate_prompt_rows, 59);
        assert_eq!(shared_rows(&rig, 1), 1, "its last token");
        assert_eq!(take(&mut other, 5), expected(&long(60), 5));
        assert_eq!(take(&mut stream, 20), expected(&STREAM, 21)[1..]);
    });
}

#[test]
fn what_the_sequence_holds_goes_along() {
    in_time(|| {
        let rig = Rig::new(&options());
        let mut other = rig.prompted(&long(30));
        take(&mut other, 1);
        other.trim(30).expect("a trim is possible");
        let _stream = streaming(&rig);
        let rest = [9; 40];
        other.decode_prompt(&rest, 30).expect("the prompt is decoded");
        assert_eq!(rig.metrics().separate_prompt_rows, 39);
        assert_eq!(take(&mut other, 5), expected(&[long(30), rest.to_vec()].concat(), 5));
    });
}

#[test]
fn short_prompts_and_those_without_a_stream_stay() {
    in_time(|| {
        let rig = Rig::new(&options());
        let mut first = rig.prompted(&long(60));
        assert_eq!(take(&mut first, 3), expected(&long(60), 3));
        let _stream = streaming(&rig);
        rig.prompted(&[1, 2, 3]);
        assert_eq!(rig.prefill_script.calls(), 0);
        assert_eq!(rig.metrics().separate_prompt_rows, 0);
    });
}

#[test]
fn a_cancel_breaks_it_off_and_leaves_what_was_there() {
    in_time(|| {
        let rig = Rig::new(&options());
        let mut other = rig.prompted(&long(10));
        let mut stream = streaming(&rig);
        rig.prefill_script.close_after(1);
        let canceller = other.canceller();
        let host = std::thread::spawn(move || (other.decode_prompt(&long(60), 10), other));
        rig.prefill_script.wait_for_calls(2);
        canceller.cancel();
        let (result, mut other) = host.join().expect("the host ends");
        assert_eq!(result, Err(PromptError::Cancelled));
        assert_eq!(other.position_count(), 10);
        other.trim(10).expect("a trim is possible");
        rig.prefill_script.open();
        let rest = [7; 50];
        other.decode_prompt(&rest, 10).expect("it works again");
        assert_eq!(take(&mut other, 5), expected(&[long(10), rest.to_vec()].concat(), 5));
        assert_eq!(take(&mut stream, 20), expected(&STREAM, 21)[1..]);
    });
}

#[test]
fn a_sequence_may_go_meanwhile() {
    in_time(|| {
        let rig = Rig::new(&options());
        let mut stream = streaming(&rig);
        rig.prefill_script.close_after(1);
        let other = rig.greedy();
        let canceller = other.canceller();
        let host = std::thread::spawn(move || {
            let mut other = other;
            assert_eq!(other.decode_prompt(&long(60), 0), Err(PromptError::Cancelled));
        });
        rig.prefill_script.wait_for_calls(2);
        canceller.cancel();
        host.join().expect("the host ends, and its sequence with it");
        // The slot has a new sequence, whose prompt is not mistaken for the old one.
        let mut new = rig.greedy();
        rig.prefill_script.open();
        new.decode_prompt(&long(45), 0).expect("the prompt is decoded");
        assert_eq!(take(&mut new, 5), expected(&long(45), 5));
        assert_eq!(take(&mut stream, 20), expected(&STREAM, 21)[1..]);
    });
}

#[test]
fn whatever_goes_wrong_there_is_made_good_here() {
    in_time(|| {
        for fault in [Fault::Failed(0), Fault::NoKvCells, Fault::Panic] {
            let rig = Rig::new(&options());
            let mut stream = streaming(&rig);
            rig.prefill_script.fail(2, fault);
            let mut other = rig.greedy();
            other.decode_prompt(&long(60), 0).expect("the prompt is decoded");
            assert_eq!(take(&mut other, 5), expected(&long(60), 5), "{fault:?}");
            assert_eq!(take(&mut stream, 20), expected(&STREAM, 21)[1..]);
            assert_eq!(rig.metrics().separate_prompt_rows, 0);
        }
    });
}

#[test]
fn a_prompt_that_cannot_be_decoded_fails_as_ever() {
    in_time(|| {
        let poison = Poison { fails: Some(33), ..Poison::default() };
        let rig = Rig::new(&Options { poison, ..options() });
        // It ends at the first such token of its own.
        let _stream = streaming(&rig);
        let mut other = rig.greedy();
        let result = other.decode_prompt(&long(60), 0);
        assert!(matches!(result, Err(PromptError::Decode(DecodeError::Failed { .. }))), "{result:?}");
    });
}

#[test]
fn a_state_that_is_refused_costs_a_decode_or_says_what_is_lost() {
    in_time(|| {
        let rig = Rig::new(&options());
        let mut held = rig.prompted(&long(10));
        let mut stream = streaming(&rig);
        rig.script.refuse_states();
        // There was something to lose, and the host hears of it.
        let result = held.decode_prompt(&long(60), 10);
        assert!(matches!(result, Err(PromptError::Decode(DecodeError::Failed { .. }))), "{result:?}");
        assert_eq!(held.position_count(), 0);
        let mut other = rig.greedy();
        other.decode_prompt(&long(60), 0).expect("the prompt is decoded");
        assert_eq!(take(&mut other, 5), expected(&long(60), 5));
        assert_eq!(take(&mut stream, 20), expected(&STREAM, 21)[1..]);

        let rig = Rig::new(&options());
        let _stream = streaming(&rig);
        rig.script.refuse_states();
        let mut other = rig.greedy();
        other.decode_prompt(&long(60), 0).expect("nothing was there to lose");
        assert_eq!(take(&mut other, 5), expected(&long(60), 5));
    });
}

#[test]
fn shutting_down_does_not_wait_for_it() {
    in_time(|| {
        let mut rig = Rig::new(&options());
        let _stream = streaming(&rig);
        let mut other = rig.greedy();
        rig.prefill_script.close_after(1);
        let host = std::thread::spawn(move || other.decode_prompt(&long(60), 0));
        rig.prefill_script.wait_for_calls(2);
        std::thread::sleep(Duration::from_millis(2));
        rig.shut_down();
        assert_eq!(host.join().expect("the host ends"), Err(PromptError::Shutdown));
    });
}
