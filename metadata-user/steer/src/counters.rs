//! Frames by verdict.

use metadata_common::verdict::Verdict;

/// Frames by verdict since steering started, summed over CPUs. Each count wraps at 2⁶⁴.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    frames: Vec<u64>,
}

impl Counters {
    /// Takes the counts of [`Verdict::ALL`], in that order.
    pub(super) fn new(frames: Vec<u64>) -> Self {
        Self { frames }
    }

    /// The number of frames with this verdict.
    #[must_use]
    pub fn get(&self, verdict: Verdict) -> u64 {
        usize::try_from(verdict.index()).ok().and_then(|index| self.frames.get(index)).copied().unwrap_or(0)
    }

    /// Every verdict with its number of frames.
    pub fn iter(&self) -> impl Iterator<Item = (Verdict, u64)> {
        Verdict::ALL.iter().copied().zip(self.frames.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::Counters;
    use metadata_common::verdict::Verdict;

    #[test]
    fn each_verdict_has_its_own_count() {
        let counters = Counters::new((0..u64::from(Verdict::COUNT)).map(|n| n * 10).collect());
        for (verdict, frames) in counters.iter() {
            assert_eq!(frames, u64::from(verdict.index()) * 10, "{verdict:?}");
            assert_eq!(counters.get(verdict), frames, "{verdict:?}");
        }
        assert_eq!(counters.iter().count(), Verdict::ALL.len());
    }
}
