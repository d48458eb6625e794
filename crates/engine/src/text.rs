//! Bytes of tokens as text that may be shown: whole characters, and nothing that may become a stop text.

/// Pure: bytes in, bytes out.
#[derive(Debug)]
pub(crate) struct TextStream {
    stops: Vec<Vec<u8>>,
    /// Bytes that were not given out yet.
    held: Vec<u8>,
    /// How many of them may be.
    ready: usize,
}

impl TextStream {
    pub(crate) fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).map(String::into_bytes).collect();
        Self { stops, held: Vec::new(), ready: 0 }
    }

    /// Takes a token's bytes. `true`: a stop text came; it, and what is behind it, is gone.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        let before = self.held.len();
        self.held.extend_from_slice(bytes);
        let find = |stop: &Vec<u8>| {
            let from = before.saturating_sub(stop.len() - 1);
            self.held[from..].windows(stop.len()).position(|window| window == stop).map(|at| from + at)
        };
        if let Some(at) = self.stops.iter().filter_map(find).min() {
            self.held.truncate(at);
            self.ready = at;
            return true;
        }
        let may_stop = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        self.ready =
            self.held.len() - may_stop.max(unfinished(&self.held[..self.held.len() - may_stop]) + may_stop);
        false
    }

    /// Nothing more will come: what is held back may be shown.
    pub(crate) fn finish(&mut self) {
        self.ready = self.held.len();
    }

    /// What may be shown, if that is anything.
    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let rest = self.held.split_off(self.ready);
        let ready = std::mem::replace(&mut self.held, rest);
        self.ready = 0;
        (!ready.is_empty()).then_some(ready)
    }
}

/// The length of the longest end of `text` that `stop` begins with.
fn overlap(text: &[u8], stop: &[u8]) -> usize {
    (1..stop.len().min(text.len() + 1)).rev().find(|&length| text.ends_with(&stop[..length])).unwrap_or(0)
}

/// Bytes at the end that are the begin of a longer character.
fn unfinished(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let tail = &bytes[bytes.len() - back..];
        if !(0x80..=0xbf).contains(&tail[0]) {
            let begun = std::str::from_utf8(tail).is_err_and(|error| error.error_len().is_none());
            return if begun { back } else { 0 };
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&[u8]]) -> (Vec<String>, bool) {
        let mut stream = TextStream::new(stops.iter().map(ToString::to_string).collect());
        let mut out = Vec::new();
        let mut stopped = false;
        for piece in pieces {
            stopped = stream.push(piece);
            out.extend(stream.take());
            if stopped {
                break;
            }
        }
        stream.finish();
        out.extend(stream.take());
        (out.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect(), stopped)
    }

    #[test]
    fn characters_are_never_cut() {
        let snowman = "☃".as_bytes();
        let (out, _) = run(&[], &[b"a", &snowman[..1], &snowman[1..2], &snowman[2..], b"b"]);
        assert_eq!(out, ["a", "☃", "b"]);
        let (out, _) = run(&[], &[&"😀".as_bytes()[..3], &"😀".as_bytes()[3..]]);
        assert_eq!(out, ["😀"]);
    }

    #[test]
    fn bytes_that_are_no_text_come_out_all_the_same() {
        let (out, _) = run(&[], &[b"a\xff", b"b\x80", b"\xf0\x9f"]);
        assert_eq!(out.concat(), "a\u{fffd}b\u{fffd}\u{fffd}");
    }

    #[test]
    fn a_stop_text_is_found_across_pieces_and_its_begin_is_held_back() {
        assert_eq!(run(&["END"], &[b"xE", b"N", b"D y"]), (vec!["x".to_owned()], true));
        assert_eq!(run(&["END"], &[b"xE", b"N", b"x"]), (vec!["x".to_owned(), "ENx".to_owned()], false));
        assert_eq!(run(&["aab"], &[b"aa", b"aab"]), (vec!["aa".to_owned()], true));
        assert_eq!(run(&["zz", "b"], &[b"abzz"]), (vec!["a".to_owned()], true));
        assert_eq!(run(&["☃"], &["a☃".as_bytes()]), (vec!["a".to_owned()], true));
    }
}
