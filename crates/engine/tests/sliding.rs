//! Sliding windows: what they still hold, and what they do not.
#![allow(missing_docs)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Subject, alone, complete, greedy, long_prompt, sequence, start, take, tokens};
use engine::KvLayout;
use fixtures::SmallModel;

#[test]
fn a_shared_buffer_forgets_nothing_that_a_window_needs() {
    for full_sliding_window in [true, false] {
        for (batch_size, ubatch_size) in [(64, Some(8)), (64, None), (512, Some(32))] {
            let engine = Subject::small(SmallModel::Sliding).load(|config| {
                config.max_sequences = 3;
                config.kv_layout = KvLayout::Unified;
                config.full_sliding_window = full_sliding_window;
                (config.batch_size, config.ubatch_size) = (batch_size, ubatch_size);
            });
            let long = long_prompt(&engine, 240);
            let expected = tokens(&alone(&engine, &long, 200));
            // Cells that others leave have newer positions get in front of older ones.
            let mut first = sequence(&engine, greedy());
            let mut second = sequence(&engine, greedy());
            let mut third = sequence(&engine, greedy());
            start(&mut first, &long[..16]);
            start(&mut second, &long[..100]);
            start(&mut third, &long[..200]);
            drop(second);
            third.decode_prompt(&long[200..216], 200).expect("there is room");
            drop(first);
            third.decode_prompt(&long[216..], 216).expect("there is room");
            let what = format!("batch {batch_size}, ubatch {ubatch_size:?}, {full_sliding_window}");
            assert_eq!(take(&mut third, 200), expected, "{what}");
        }
    }
}

#[test]
fn a_neighbours_cancel_costs_a_sliding_window_nothing() {
    let engine = Subject::small(SmallModel::Sliding).load(|_| {});
    let (short, long) = (long_prompt(&engine, 20), long_prompt(&engine, 400));
    let expected = tokens(&alone(&engine, &short, 80));
    let mut first = sequence(&engine, greedy());
    // A slot between the two takes no part, so that each has a ubatch of its own.
    let _idle = sequence(&engine, greedy());
    let mut other = sequence(&engine, greedy());
    for _ in 0..10 {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (done, first, long) = (&done, &mut first, &long);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let canceller = first.canceller();
                    std::thread::scope(|scope| {
                        scope.spawn(|| _ = first.decode_prompt(long, 0));
                        std::thread::sleep(Duration::from_micros(700));
                        canceller.cancel();
                    });
                    first.trim(0).expect("it can be emptied");
                }
            });
            let said = complete(&mut other, &short, 60);
            done.store(true, Ordering::Relaxed);
            assert_eq!(said, expected[..60]);
        });
        other.trim(5).expect("the window is kept whole");
        other.decode_prompt(&short[5..], 5).expect("it goes on");
        assert_eq!(take(&mut other, 20), expected[..20], "after the trim");
        other.trim(0).expect("it can be emptied");
    }
}
