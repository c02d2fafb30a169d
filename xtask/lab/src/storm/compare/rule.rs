//! Decides whether two sets of rounds differ: whether a difference is large enough to matter and too regular for
//! chance.
//!
//! A difference is large enough if the medians differ by more than the figure's threshold. With at least
//! [`ENOUGH_ROUNDS`] rounds in each set, it is too regular for chance if the exact two-sided rank test of Mann and
//! Whitney (1947) gives a probability of at most [`CHANCE`]. With fewer rounds the test could never give that. Then
//! every round of one set must lie beyond every round of the other, and the medians must be further apart than the
//! range of either set. Below [`FEWEST_ROUNDS`] there is no verdict.

use crate::storm::model::Spread;

/// The least number of rounds in each set for the rank test to reach [`CHANCE`].
pub(super) const ENOUGH_ROUNDS: usize = 5;
/// The least number of rounds in each set for a verdict.
pub(super) const FEWEST_ROUNDS: usize = 3;
/// The probability of ranks at least this uneven if both sets were alike. A comparison has dozens of figures, so with 5
/// % some would always raise a false alarm.
pub(super) const CHANCE: f64 = 0.01;
/// The most rounds of each set that are ranked. More would add little and overflow the count of arrangements.
const MOST_ROUNDS: usize = 30;

/// The verdict on a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Regression,
    Improvement,
    NoDifference,
    /// Fewer rounds than [`FEWEST_ROUNDS`].
    TooFewRounds,
    /// The figure is shown but not judged.
    NotJudged,
}

/// Judges the rounds `after` against the rounds `before`.
pub(super) fn judge(
    before: &[f64],
    after: &[f64],
    threshold: Option<f64>,
    higher_is_better: bool,
) -> Verdict {
    let Some(threshold) = threshold else { return Verdict::NotJudged };
    let fewest = before.len().min(after.len());
    if fewest < FEWEST_ROUNDS {
        return Verdict::TooFewRounds;
    }
    let (Some(was), Some(is)) = (Spread::of(before.iter().copied()), Spread::of(after.iter().copied()))
    else {
        return Verdict::TooFewRounds;
    };
    let difference = is.median - was.median;
    if difference == 0.0 || difference.abs() <= threshold * was.median.abs() {
        return Verdict::NoDifference;
    }
    let regular = if fewest < ENOUGH_ROUNDS {
        let apart = is.low > was.high || is.high < was.low;
        apart && difference.abs() > (was.high - was.low).max(is.high - is.low)
    } else {
        probability(before, after) <= CHANCE
    };
    match (regular, (difference > 0.0) == higher_is_better) {
        (false, _) => Verdict::NoDifference,
        (true, true) => Verdict::Improvement,
        (true, false) => Verdict::Regression,
    }
}

/// Returns the two-sided probability of ranks at least this uneven, if both sets came from the same distribution.
fn probability(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (&a[..a.len().min(MOST_ROUNDS)], &b[..b.len().min(MOST_ROUNDS)]);
    // This is twice U, so that ties, which count one half, stay whole. Rounding towards the middle avoids false alarms.
    let twice: usize =
        a.iter().map(|x| b.iter().map(|y| 2 * usize::from(x > y) + usize::from(x == y)).sum::<usize>()).sum();
    let pairs = a.len() * b.len();
    let u = twice.min(2 * pairs - twice).div_ceil(2);
    let arrangements = arrangements(a.len(), b.len());
    let all: f64 = arrangements.iter().sum();
    let tail: f64 = arrangements[..=u.min(pairs)].iter().sum();
    (2.0 * tail / all).min(1.0)
}

/// Returns how many arrangements of `m` and `n` values in one row have each value of U. The recurrence removes the
/// greatest value, which belongs to one set or the other.
fn arrangements(m: usize, n: usize) -> Vec<f64> {
    // table[j][u], for the values of the first set so far.
    let mut table: Vec<Vec<f64>> = (0..=n).map(|_| vec![1.0]).collect();
    for i in 1..=m {
        let mut next: Vec<Vec<f64>> = vec![vec![1.0]];
        for j in 1..=n {
            let mut counts = vec![0.0; i * j + 1];
            // The greatest value belongs to the first set: it is above all j values of the other.
            for (u, count) in table[j].iter().enumerate() {
                counts[u + j] += count;
            }
            for (u, count) in next[j - 1].iter().enumerate() {
                counts[u] += count;
            }
            next.push(counts);
        }
        table = next;
    }
    table.swap_remove(n)
}

#[cfg(test)]
mod tests {
    use super::{Verdict, arrangements, judge, probability};

    #[test]
    fn arrangements_add_up_to_the_binomial_coefficient() {
        for (m, n, all) in [(1, 1, 2.0), (3, 3, 20.0), (4, 4, 70.0), (5, 5, 252.0), (2, 7, 36.0)] {
            let counts = arrangements(m, n);
            assert_eq!(counts.iter().sum::<f64>(), all, "{m}, {n}");
            assert!(counts.iter().eq(counts.iter().rev()), "{m}, {n}: not even: {counts:?}");
        }
    }

    #[test]
    fn probabilities_match_the_published_tables() {
        // Mann and Whitney (1947), table I, doubled: m = n = 5.
        let apart = probability(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]);
        assert!((apart - 2.0 / 252.0).abs() < 1e-12, "{apart}");
        let one_swapped = probability(&[1.0, 2.0, 3.0, 4.0, 6.0], &[5.0, 7.0, 8.0, 9.0, 10.0]);
        assert!((one_swapped - 4.0 / 252.0).abs() < 1e-12, "{one_swapped}");
        assert_eq!(probability(&[1.0; 6], &[1.0; 6]), 1.0);
    }

    #[test]
    fn a_difference_must_be_large_and_regular() {
        let five = |by: f64| [100.0, 101.0, 102.0, 103.0, 104.0].map(|value| value * by);
        type Row<'a> = (&'a str, &'a [f64], &'a [f64], Option<f64>, Verdict);
        let cases: &[Row<'_>] = &[
            ("the same", &five(1.0), &five(1.0), Some(0.05), Verdict::NoDifference),
            ("regular and large", &five(1.0), &five(1.1), Some(0.05), Verdict::Regression),
            ("regular and small", &five(1.0), &five(1.045), Some(0.05), Verdict::NoDifference),
            (
                "large and irregular",
                &[100.0, 50.0, 200.0, 80.0, 150.0],
                &[130.0, 60.0, 220.0, 90.0, 140.0],
                Some(0.05),
                Verdict::NoDifference,
            ),
            ("better", &five(1.0), &five(0.5), Some(0.05), Verdict::Improvement),
            (
                "four rounds, apart by more than they spread",
                &five(1.0)[..4],
                &five(1.1)[..4],
                Some(0.05),
                Verdict::Regression,
            ),
            (
                "four rounds, apart by less than they spread",
                &[100.0, 105.0, 106.0, 120.0],
                &[121.0, 122.0, 123.0, 124.0],
                Some(0.05),
                Verdict::NoDifference,
            ),
            ("two rounds", &[100.0, 101.0], &[200.0, 201.0], Some(0.05), Verdict::TooFewRounds),
            ("nothing", &[], &[], Some(0.05), Verdict::TooFewRounds),
            ("not judged", &five(1.0), &five(9.0), None, Verdict::NotJudged),
            ("from nothing to something", &[0.0; 5], &[3.0; 5], Some(0.0), Verdict::Regression),
        ];
        for (name, before, after, threshold, verdict) in cases {
            assert_eq!(judge(before, after, *threshold, false), *verdict, "{name}");
        }
        assert_eq!(judge(&five(1.0), &five(1.5), Some(0.1), true), Verdict::Improvement);
        assert_eq!(judge(&five(1.5), &five(1.0), Some(0.1), true), Verdict::Regression);
    }
}
