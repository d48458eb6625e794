//! Tokens that must not be chosen.

use super::scan;
use crate::llama::LlamaModel;
use crate::model::Token;

/// Which lists of [`Masks`] apply. Control, unknown and unused tokens are never chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Mask {
    /// No token with a line break.
    pub(crate) single_line: bool,
    /// No token that begins with whitespace.
    pub(crate) word_continuation: bool,
}

/// The lists of a model's vocabulary. Tokens that end generation are on none of them.
#[derive(Debug, Default)]
pub(crate) struct Masks {
    special: Vec<Token>,
    line_break: Vec<Token>,
    leading_space: Vec<Token>,
    /// For each token a bit a list, in the order above.
    bits: Vec<u8>,
}

const SPECIAL: u8 = 1;
const LINE_BREAK: u8 = 2;
const LEADING_SPACE: u8 = 4;

impl Masks {
    pub(crate) fn of(model: &LlamaModel) -> Self {
        Self::new(model.vocabulary_size(), |token, piece| {
            // A token that llama.cpp cannot render stays without a piece, and so on no list but the first.
            let _ = model.append_piece(token, false, piece);
            (model.is_eog(token), model.is_special(token))
        })
    }

    /// From a function that appends a token's bytes and says whether it ends generation, and whether it is special.
    pub(crate) fn new(
        vocabulary: u32,
        mut describe: impl FnMut(Token, &mut Vec<u8>) -> (bool, bool),
    ) -> Self {
        let mut masks = Self { bits: vec![0; vocabulary as usize], ..Self::default() };
        let mut piece = Vec::new();
        for token in 0..vocabulary as Token {
            piece.clear();
            let (ends, special) = describe(token, &mut piece);
            if ends {
                continue;
            }
            let bits = &mut masks.bits[token as usize];
            if special {
                *bits |= SPECIAL;
                masks.special.push(token);
            }
            if has_line_break(&piece) {
                *bits |= LINE_BREAK;
                masks.line_break.push(token);
            }
            if begins_with_space(&piece) {
                *bits |= LEADING_SPACE;
                masks.leading_space.push(token);
            }
        }
        masks
    }

    fn lists(&self, mask: Mask) -> impl Iterator<Item = &[Token]> {
        let lists = [
            Some(&self.special),
            mask.single_line.then_some(&self.line_break),
            mask.word_continuation.then_some(&self.leading_space),
        ];
        lists.into_iter().flatten().map(Vec::as_slice)
    }

    pub(super) fn hides(&self, mask: Mask, token: usize) -> bool {
        let wanted = SPECIAL
            | if mask.single_line { LINE_BREAK } else { 0 }
            | if mask.word_continuation { LEADING_SPACE } else { 0 };
        self.bits.get(token).is_some_and(|bits| bits & wanted != 0)
    }

    /// Hides the tokens of a row whose blocks' maxima are known.
    pub(super) fn apply(&self, mask: Mask, row: &mut [f32], maxima: &mut [f32]) {
        for list in self.lists(mask) {
            for &token in list {
                scan::lower(row, maxima, token as usize, f32::NEG_INFINITY);
            }
        }
    }
}

/// Line feed, carriage return, vertical tab, form feed, and Unicode's next line, line and paragraph separators.
fn has_line_break(piece: &[u8]) -> bool {
    piece.iter().any(|byte| (0x0a..=0x0d).contains(byte))
        || [&b"\xc2\x85"[..], b"\xe2\x80\xa8", b"\xe2\x80\xa9"]
            .iter()
            .any(|separator| piece.windows(separator.len()).any(|window| window == *separator))
}

fn begins_with_space(piece: &[u8]) -> bool {
    let head = &piece[..piece.len().min(4)];
    let valid = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&head[..error.valid_up_to()]).unwrap_or_default(),
    };
    valid.starts_with(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_breaks_and_spaces_are_found_in_any_script() {
        for piece in ["\n", "a\r\n", "\u{85}", "x\u{2028}", "\u{2029}y"] {
            assert!(has_line_break(piece.as_bytes()), "{piece:?}");
        }
        assert!(!has_line_break("a b\tc".as_bytes()));
        for piece in [" a", "\t", "\n", "\u{a0}b", "\u{3000}"] {
            assert!(begins_with_space(piece.as_bytes()), "{piece:?}");
        }
        for piece in ["a ", "", "\u{200b}", "é"] {
            assert!(!begins_with_space(piece.as_bytes()), "{piece:?}");
        }
        assert!(!begins_with_space(b"\xe2\x80"));
    }

    #[test]
    fn tokens_that_end_generation_are_never_hidden() {
        let masks = Masks::new(3, |token, piece| {
            piece.push(b'\n');
            (token == 1, true)
        });
        let all = Mask { single_line: true, word_continuation: true };
        let mut row = [0.0; 3];
        masks.apply(all, &mut row, &mut [0.0]);
        assert_eq!(row.map(f32::is_finite), [false, true, false]);
        assert!(masks.hides(all, 0) && !masks.hides(all, 1));
    }
}
