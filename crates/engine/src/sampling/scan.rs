//! Passes over a row of logits, written so that the compiler vectorises them.

/// Logits a block. A block's maximum says whether it is worth a look.
pub(super) const BLOCK: usize = 128;
/// Logits that are worked on at once: a multiple of the widest vectors, and a power of two.
const LANES: usize = 16;
/// Logits from which on it pays to share a sum with another thread.
const MIN_SHARED: usize = 65_536;

/// Writes each block's maximum to `maxima`. NaN counts as nothing.
pub(super) fn block_maxima(row: &[f32], maxima: &mut Vec<f32>) {
    maxima.clear();
    maxima.extend(row.chunks(BLOCK).map(max_of));
}

fn max_of(block: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = block.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = higher(*lane, logit);
        }
    }
    // By halves, which are vectors as well: one lane after the other would take longer than the block itself.
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = higher(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    chunks.remainder().iter().copied().fold(lanes[0], higher)
}

/// The higher one; `a` if `b` is NaN.
#[inline]
fn higher(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Sets a logit to something lower, and keeps its block's maximum right.
pub(super) fn lower(row: &mut [f32], maxima: &mut [f32], token: usize, logit: f32) {
    let was = std::mem::replace(&mut row[token], logit);
    let block = token / BLOCK;
    if was > logit && was >= maxima[block] {
        let start = block * BLOCK;
        maxima[block] = max_of(&row[start..row.len().min(start + BLOCK)]);
    }
}

/// The first index of the highest logit, or `None` for a row with nothing above negative infinity.
pub(super) fn argmax(row: &[f32], maxima: &[f32]) -> Option<usize> {
    let mut best = (0, f32::NEG_INFINITY);
    for (block, &max) in maxima.iter().enumerate() {
        if max > best.1 {
            best = (block, max);
        }
    }
    let start = best.0 * BLOCK;
    let block = &row[start.min(row.len())..row.len().min(start + BLOCK)];
    (best.1 > f32::NEG_INFINITY)
        .then(|| block.iter().position(|&logit| logit >= best.1))?
        .map(|at| start + at)
}

/// A value that at least `k` logits reach and not many more: the `k`-th highest block maximum, or, if there are fewer blocks,
/// logit. Negative infinity if there are fewer of these as well. NaN counts as nothing.
pub(super) fn kth_floor(row: &[f32], maxima: &[f32], k: usize, order: &mut Vec<f32>) -> f32 {
    let values = if k <= maxima.len() { maxima } else { row };
    order.clear();
    order.extend(values.iter().copied().filter(|value| !value.is_nan()));
    if k > order.len() {
        return f32::NEG_INFINITY;
    }
    *order.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

/// The sum of `exp((logit - max) * scale)`. No logit is above `max`. On a thread of a pool, others help with a long row.
pub(super) fn sum_exp(row: &[f32], max: f32, scale: f32) -> f32 {
    let (front, back) = row.split_at(row.len() / 2 / LANES * LANES);
    let (front, back) = if row.len() >= MIN_SHARED && rayon::current_thread_index().is_some() {
        rayon::join(|| sum_exp_serial(front, max, scale), || sum_exp_serial(back, max, scale))
    } else {
        (sum_exp_serial(front, max, scale), sum_exp_serial(back, max, scale))
    };
    (front + back) as f32
}

fn sum_exp_serial(row: &[f32], max: f32, scale: f32) -> f64 {
    // In pieces, so that a large vocabulary does not drown its small terms: an f32 keeps 24 bits.
    row.chunks(4096)
        .map(|piece| {
            let mut lanes = [0.0_f32; LANES];
            let mut chunks = piece.chunks_exact(LANES);
            for chunk in &mut chunks {
                for (lane, &logit) in lanes.iter_mut().zip(chunk) {
                    *lane += exp((logit - max) * scale);
                }
            }
            let tail: f32 = chunks.remainder().iter().map(|&logit| exp((logit - max) * scale)).sum();
            f64::from(lanes.into_iter().sum::<f32>() + tail)
        })
        .sum()
}

/// `a * b + c`, fused where the processor does that: elsewhere it would be a call.
#[inline]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { a.mul_add(b, c) } else { a * b + c }
}

/// e^x for x <= 0, within 2 units of the last place, without a branch; 0 below -87, and for NaN.
///
/// x is split into n·ln 2 + r with |r| <= ln 2 / 2, e^r comes from its Taylor polynomial, and 2^n from the exponent's
/// bits.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = mul_add(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add(-n, LN_2_LOW, mul_add(-n, LN_2_HIGH, clamped));
    let power = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0]
        .into_iter()
        .fold(1.0 / 5040.0, |sum, coefficient| mul_add(sum, r, coefficient));
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x >= -87.0 { power * scale } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_real_one() {
        for step in 0..=870_000 {
            let x = -(step as f32) / 10_000.0;
            let (ours, real) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours - real).abs() <= real * 3e-7, "exp({x}) is {real}, not {ours}");
        }
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0.0_f32.to_bits());
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
    }

    #[test]
    fn argmax_is_the_first_of_equals_and_passes_over_nan() {
        for len in [1, 15, 16, 17, 127, 128, 129, 1000] {
            for at in [0, len / 2, len - 1] {
                let mut row = vec![-1.0; len];
                row[at] = 5.0;
                row[len - 1] = 5.0;
                if at > 0 {
                    row[0] = f32::NAN;
                }
                let mut maxima = Vec::new();
                block_maxima(&row, &mut maxima);
                assert_eq!(argmax(&row, &maxima), Some(at), "length {len}");
            }
        }
        let mut maxima = Vec::new();
        block_maxima(&[f32::NAN; 40], &mut maxima);
        assert_eq!(argmax(&[f32::NAN; 40], &maxima), None);
    }
}
