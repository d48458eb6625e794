//! Decodes that fail: who hears of it, and who must not.

use super::{Options, Rig, expected, in_time, take};
use crate::backend::scripted::{Fault, Poison};
use crate::error::{DecodeError, PromptError, SampleError};
use crate::model::Token;

const PROMPTS: [&[Token]; 3] = [&[1, 5, 9], &[2, 4, 8, 16], &[40, 41]];

#[test]
fn a_failed_step_of_several_is_made_good() {
    let faults = [
        Fault::NoKvCells,
        Fault::Failed(0),
        Fault::Failed(2),
        Fault::Aborted(1),
        Fault::Thrown(0),
        Fault::Thrown(2),
        Fault::NoLogits,
    ];
    for fault in faults {
        in_time(move || {
            let rig = Rig::new(&Options { run_ahead: 0, ..Options::default() });
            let mut sequences = PROMPTS.map(|prompt| rig.prompted(prompt));
            rig.script.fail_shared(3, fault);
            rig.script.close_after(0);
            // All are in the steps after the one that waits.
            for sequence in &mut sequences {
                sequence.ask(30).expect("the queue has room");
            }
            rig.script.open();
            for (sequence, prompt) in sequences.iter_mut().zip(PROMPTS) {
                assert_eq!(take(sequence, 30), expected(prompt, 30), "{fault:?}");
            }
            assert_eq!(rig.metrics().decode_failures, 3);
        });
    }
}

#[test]
fn after_a_shared_failure_each_is_tried_alone_and_then_together_again() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: 64, ..Options::default() });
        let mut sequences = PROMPTS.map(|prompt| rig.prompted(prompt));
        rig.script.close_after(0);
        let before = rig.script.calls();
        // All are in the step after the one that waits.
        rig.script.fail(2, Fault::Failed(2));
        for sequence in &mut sequences {
            sequence.ask(2).expect("the queue has room");
        }
        rig.script.open();
        rig.script.wait_for_calls(before + 8);
        let steps = rig.script.steps();
        let slots = |call: u64| -> Vec<u32> {
            steps[(before + call - 1) as usize].iter().map(|row| row.slot).collect()
        };
        assert_eq!(slots(2), [0, 1, 2], "the one that fails");
        assert_eq!((slots(3), slots(4), slots(5)), (vec![0], vec![1], vec![2]), "each alone");
        assert_eq!(slots(6), [0, 1, 2], "together again");
    });
}

#[test]
fn a_prompt_at_fault_fails_alone_and_works_after_a_trim() {
    in_time(|| {
        let untouched = expected(PROMPTS[0], 60);
        let mut prompt: Vec<Token> = (12..52).collect();
        let used = |token: &Token| untouched.contains(token) || PROMPTS[0].contains(token);
        let poison = (52..61).find(|token| !used(token)).expect("60 tokens are not all");
        prompt[30] = poison;
        let poison = Poison { fails: Some(poison), no_number: None };
        let rig = Rig::new(&Options { poison, ..Options::default() });
        let mut neighbour = rig.prompted(PROMPTS[0]);
        let taker = std::thread::spawn(move || take(&mut neighbour, 60));
        let mut sequence = rig.greedy();
        let error = sequence.decode_prompt(&prompt, 0).expect_err("poison");
        assert!(matches!(error, PromptError::Decode(DecodeError::Failed { .. })), "{error:?}");
        let held = sequence.position_count();
        assert!(held <= 30, "{held} positions, but the 31st token never was decoded");
        assert_eq!(sequence.sample_next(), Err(SampleError::NoPrompt));
        // It may go on from what is held, or from any of it.
        sequence.trim(held / 2).expect("a trim is possible");
        let start = held / 2;
        prompt[30] = untouched[0];
        sequence.decode_prompt(&prompt[start as usize..], start).expect("no poison");
        assert_eq!(take(&mut sequence, 5), expected(&prompt, 5));
        assert_eq!(taker.join().expect("the neighbour goes on"), untouched);
    });
}

#[test]
fn rows_that_a_failed_prompt_left_are_counted() {
    in_time(|| {
        for fault in [Fault::Failed(5), Fault::Failed(16), Fault::NoKvCells] {
            let rig = Rig::new(&Options::default());
            let mut sequence = rig.greedy();
            let prompt: Vec<Token> = (12..52).collect();
            rig.script.fail(2, fault);
            let error = sequence.decode_prompt(&prompt, 0).expect_err("the second chunk fails");
            assert!(matches!(error, PromptError::Decode(_)), "{error:?}");
            let held = if let Fault::Failed(kept) = fault { 16 + kept as u32 } else { 16 };
            assert_eq!(sequence.position_count(), held, "{fault:?}");
            sequence.decode_prompt(&prompt[held as usize..], held).expect("the rest is decoded");
            assert_eq!(take(&mut sequence, 5), expected(&prompt, 5), "{fault:?}");
        }
    });
}

#[test]
fn a_state_that_a_failed_step_of_others_may_have_moved_is_given_up() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: 0, rolls_back: false, ..Options::default() });
        let [mut idle, mut first, mut second] = PROMPTS.map(|prompt| rig.prompted(prompt));
        rig.script.close_after(0);
        first.ask(3).expect("the queue has room");
        second.ask(3).expect("the queue has room");
        let calls = rig.script.calls();
        rig.script.fail_shared(1, Fault::Failed(0));
        rig.script.open();
        rig.script.wait_for_calls(calls + 3);
        let lost = |sample: Result<_, SampleError>| matches!(sample, Err(SampleError::Decode(_)));
        assert!(lost(idle.sample_next().and_then(|_| idle.sample_next())), "it sat out");
        assert_eq!(idle.position_count(), 0);
        idle.decode_prompt(PROMPTS[0], 0).expect("it is empty");
        assert_eq!(take(&mut idle, 5), expected(PROMPTS[0], 5));
        // The others were in it, are intact, and are decoded again.
        assert_eq!(take(&mut first, 3), expected(PROMPTS[1], 3));
        assert_eq!(take(&mut second, 3), expected(PROMPTS[2], 3));
    });
}

#[test]
fn rows_that_an_exception_left_are_not_trusted() {
    in_time(|| {
        for kept in [0, 5, 16] {
            let rig = Rig::new(&Options::default());
            let mut sequence = rig.greedy();
            let prompt: Vec<Token> = (12..52).collect();
            rig.script.fail(2, Fault::Thrown(kept));
            let error = sequence.decode_prompt(&prompt, 0).expect_err("the second chunk fails");
            assert!(matches!(error, PromptError::Decode(DecodeError::Failed { .. })), "{error:?}");
            assert_eq!(sequence.position_count(), 16, "the first chunk");
            sequence.decode_prompt(&prompt[16..], 16).expect("the rest is decoded");
            assert_eq!(take(&mut sequence, 5), expected(&prompt, 5));
        }
    });
}

#[test]
fn only_who_finds_no_cells_fails() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: 0, ..Options::default() });
        let mut first = rig.prompted(PROMPTS[0]);
        rig.script.set_cells(20);
        let mut second = rig.greedy();
        let prompt: Vec<Token> = (12..42).collect();
        let error = second.decode_prompt(&prompt, 0).expect_err("there are 17 cells for 30 tokens");
        assert!(matches!(error, PromptError::Decode(DecodeError::NoKvCells { rows: 14 })), "{error:?}");
        assert_eq!(second.position_count(), 16);
        // One cell is left; then there is none until the other gives its cells back.
        let expected = expected(PROMPTS[0], 8);
        assert_eq!(take(&mut first, 2), expected[..2]);
        let error = first.sample_next().expect_err("no cell is left");
        assert!(matches!(error, SampleError::Decode(DecodeError::NoKvCells { rows: 1 })), "{error:?}");
        drop(second);
        let held = first.position_count();
        assert_eq!(held, 4);
        first.decode_prompt(&expected[1..2], held).expect("there are cells again");
        assert_eq!(first.sample_next().map(|sample| sample.token), Ok(expected[2]));
    });
}

#[test]
fn a_failure_ahead_of_the_host_waits_for_it() {
    in_time(|| {
        let rig = Rig::new(&Options { run_ahead: 8, ..Options::default() });
        let mut sequence = rig.prompted(PROMPTS[1]);
        let expected = expected(PROMPTS[1], 9);
        // The first token after the seed is sampled, the next fails.
        rig.script.fail(2, Fault::Failed(0));
        assert_eq!(take(&mut sequence, 2), expected[..2]);
        let calls = rig.script.calls();
        rig.script.wait_for_calls(calls.max(3));
        // Whatever the host does before it asks for that token, it gets the others.
        sequence.set_compute_logprob(true);
        assert_eq!(take(&mut sequence, 7), expected[2..]);
    });
}

#[test]
fn a_failure_that_lasts_reaches_the_host_at_its_token() {
    in_time(|| {
        for run_ahead in [0, 1, 8] {
            let rig = Rig::new(&Options { run_ahead, window: 40, ..Options::default() });
            let mut sequence = rig.prompted(PROMPTS[0]);
            rig.script.set_cells(PROMPTS[0].len() + 5);
            assert_eq!(take(&mut sequence, 6), expected(PROMPTS[0], 6));
            let error = SampleError::Decode(DecodeError::NoKvCells { rows: 1 });
            assert_eq!(sequence.sample_next(), Err(error), "run_ahead {run_ahead}");
            assert_eq!(sequence.sample_next(), Err(SampleError::NoPrompt));
            assert_eq!(sequence.position_count(), 8);
        }
    });
}
