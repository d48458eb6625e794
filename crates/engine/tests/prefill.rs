//! Long prompts that a second context decodes while somebody streams.
#![allow(missing_docs)]

mod common;

use common::{
    all_real, alone, assert_same, full, greedy, long_prompt, next, prompt, samples, sequence, start,
};
use engine::{KvLayout, MemoryKind, PrefillContext};

/// Tokens of a stream: more than are sampled while a prompt is decoded.
const STREAMED: usize = 150;

#[test]
fn a_context_for_long_prompts_says_what_one_context_says() {
    for subject in [full()].into_iter().chain(all_real()) {
        let layouts: &[_] =
            if subject.real { &[KvLayout::Auto] } else { &[KvLayout::PerSequence, KvLayout::Unified] };
        for &kv_layout in layouts {
            let engine = subject.load(|config| {
                config.context_window = 2048;
                config.kv_layout = kv_layout;
                config.prefill_context = PrefillContext::Separate;
            });
            let what = format!("{}, {kv_layout:?}", subject.path.display());
            let separate = engine.model().memory_kind() == MemoryKind::Full;
            let long = long_prompt(&engine, 200);
            let expected = alone(&engine, &long, 20);
            assert_eq!(engine.metrics().separate_prompt_rows, 0, "{what}: nobody streams");
            // Slots before and after the prompt's are taken.
            let mut first = sequence(&engine, greedy());
            let mut other = sequence(&engine, greedy());
            let mut last = sequence(&engine, greedy());
            let streamed = alone(&engine, &prompt(&engine, 0), STREAMED);
            other.set_compute_logprob(true);
            // What a sequence holds goes along, and comes back.
            let held = 30;
            start(&mut other, &long[..held]);
            other.trim(held as u32).unwrap_or_else(|error| panic!("{error}"));
            let before = engine.metrics();
            std::thread::scope(|scope| {
                let streams = [&mut first, &mut last]
                    .map(|stream| scope.spawn(|| samples(stream, &prompt(&engine, 0), STREAMED)));
                while engine.metrics().since(&before).sampled < 20 {
                    std::thread::yield_now();
                }
                let decoded = other.decode_prompt(&long[held..], held as u32);
                decoded.unwrap_or_else(|error| panic!("{what}: {error}"));
                let said: Vec<_> = (0..20).map(|_| next(&mut other)).collect();
                assert_same(subject.real, &said, &expected, &what);
                for stream in streams {
                    let said = stream.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                    assert_same(subject.real, &said, &streamed, &what);
                }
            });
            let rows = engine.metrics().since(&before).separate_prompt_rows;
            assert_eq!(rows, if separate { (long.len() - held - 1) as u64 } else { 0 }, "{what}");
        }
    }
}
