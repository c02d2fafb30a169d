//! How long attaching takes, for metrics and the log.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use tracing::info;

use crate::metrics::{self, Lag};
use metadata_base::port::PortName;

/// Attachments the median is taken of: the last ones.
const REMEMBERED: usize = 4_096;
/// How often the log tells how far a long pass is.
const PROGRESS: Duration = Duration::from_secs(1);

/// Attachments so far.
#[derive(Debug, Default)]
pub(super) struct Attaching {
    count: u64,
    total: Duration,
    last: VecDeque<Duration>,
    /// When progress was told last, or the pass began; `None` between passes.
    told: Option<Instant>,
    /// When taps that are asked for were seen, until they are attached.
    seen: HashMap<PortName, Instant>,
    lag: Lag,
}

impl Attaching {
    /// One port took so long, its guest bound but its record not rendered.
    pub(super) fn took(&mut self, time: Duration) {
        self.count += 1;
        self.total += time;
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back(time);
    }

    /// A port is to be looked at: its tap may be there from now on.
    pub(super) fn saw(&mut self, port: &PortName) {
        if !self.seen.contains_key(port) {
            self.seen.insert(port.clone(), Instant::now());
        }
    }

    /// A port's tap is not there, or nobody asks for it.
    pub(super) fn lost(&mut self, port: &PortName) {
        self.seen.remove(port);
    }

    /// A port's guests can ask from now on.
    pub(super) fn done(&mut self, port: &PortName, is_new: bool) {
        if let Some(seen) = self.seen.remove(port)
            && is_new
        {
            self.lag.waited(seen.elapsed());
        }
    }

    /// Says now and then how far a pass that takes long has come.
    pub(super) fn tell(&mut self, left: usize, attached: usize) {
        if left == 0 {
            self.told = None;
        } else if self.told.get_or_insert_with(Instant::now).elapsed() >= PROGRESS {
            self.told = Some(Instant::now());
            info!(attached, left, "attaching ports");
        }
    }

    /// As the metrics give them.
    pub(super) fn figures(&self) -> metrics::Attaching {
        let mut last: Vec<_> = self.last.iter().copied().collect();
        let middle = last.len() / 2;
        let median = if last.is_empty() { Duration::ZERO } else { *last.select_nth_unstable(middle).1 };
        metrics::Attaching { count: self.count, total: self.total, median, lag: self.lag }
    }
}

#[cfg(test)]
mod tests {
    use super::{Attaching, REMEMBERED};
    use std::time::Duration;

    #[test]
    fn the_median_is_of_the_last_attachments_and_the_sum_of_all() {
        let mut attaching = Attaching::default();
        assert_eq!(attaching.figures().median, Duration::ZERO);
        attaching.took(Duration::from_secs(1));
        for _ in 0..REMEMBERED {
            attaching.took(Duration::from_millis(2));
        }
        let figures = attaching.figures();
        assert_eq!((figures.count, figures.median), (REMEMBERED as u64 + 1, Duration::from_millis(2)));
        assert_eq!(figures.total, Duration::from_millis(1_000 + 2 * REMEMBERED as u64));
        assert_eq!(attaching.last.len(), REMEMBERED);
    }
}
