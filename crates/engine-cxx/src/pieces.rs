//! Token pieces that C++ hosts borrow. The API promises a piece until the next call on the same sequence, which another
//! thread may make, destroy the sequence, or unload the model with, at any moment. So pieces are never freed: each
//! distinct one is kept once, and there are no more of them than tokens in the vocabularies that this process loads.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, PoisonError};

static PIECES: LazyLock<Mutex<HashSet<&'static [u8]>>> = LazyLock::new(Mutex::default);

/// The same bytes, for as long as the process lives. A zero byte follows them in memory.
pub(crate) fn keep(piece: &[u8]) -> &'static [u8] {
    let mut pieces = PIECES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kept) = pieces.get(piece) {
        return kept;
    }
    let mut terminated = piece.to_vec();
    terminated.push(0);
    let kept = &Box::leak(terminated.into_boxed_slice())[..piece.len()];
    pieces.insert(kept);
    kept
}

#[cfg(test)]
mod tests {
    use super::keep;

    #[test]
    fn equal_pieces_are_kept_once_and_may_hold_any_bytes() {
        let (first, second) = (keep(b"a\0\xff"), keep(b"a\0\xff"));
        assert_eq!(first, b"a\0\xff");
        assert_eq!(first.as_ptr(), second.as_ptr());
        assert_ne!(first, keep(b"a\0"));
        assert_eq!(keep(b""), b"");
    }
}
