//! Measures how long attaching takes, for metrics and the log.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use tracing::info;

use crate::metrics::{self, BindHistogram};
use metadata_common::port::PortName;

/// Number of latest attachments in the median.
const REMEMBERED: usize = 4_096;
/// How often progress is logged.
const PROGRESS: Duration = Duration::from_secs(1);

/// Durations of attachments since the start.
#[derive(Debug, Default)]
pub(super) struct AttachTimes {
    count: u64,
    total: Duration,
    last: VecDeque<Duration>,
    /// When progress was last logged or the pass began; `None` between passes.
    logged: Option<Instant>,
    /// When wanted taps were first seen, until they are attached.
    seen: HashMap<PortName, Instant>,
    lag: BindHistogram,
}

impl AttachTimes {
    /// Counts a port that was attached and whose guests were bound. `time` excludes rendering.
    pub(super) fn on_attached(&mut self, time: Duration) {
        self.count += 1;
        self.total += time;
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back(time);
    }

    /// Begins the wait of a wanted port that is about to be settled, unless the wait has begun.
    pub(super) fn on_seen(&mut self, port: &PortName) {
        if !self.seen.contains_key(port) {
            self.seen.insert(port.clone(), Instant::now());
        }
    }

    /// Ends the wait of a port whose tap does not exist or is no longer wanted. The wait is not counted.
    pub(super) fn on_absent(&mut self, port: &PortName) {
        self.seen.remove(port);
    }

    /// Ends the wait of a port whose guests are served. The wait is counted if the port is newly attached.
    pub(super) fn on_served(&mut self, port: &PortName, is_new: bool) {
        if let Some(seen) = self.seen.remove(port)
            && is_new
        {
            self.lag.waited(seen.elapsed());
        }
    }

    /// Logs the progress of a pass every [`PROGRESS`]. The pass ends when no port is left.
    pub(super) fn log_progress(&mut self, left: usize, attached: usize) {
        if left == 0 {
            self.logged = None;
        } else if self.logged.get_or_insert_with(Instant::now).elapsed() >= PROGRESS {
            self.logged = Some(Instant::now());
            info!(attached, left, "attaching ports");
        }
    }

    /// The figures for the metrics.
    pub(super) fn figures(&self) -> metrics::AttachHistogram {
        let mut last: Vec<_> = self.last.iter().copied().collect();
        let middle = last.len() / 2;
        let median = if last.is_empty() { Duration::ZERO } else { *last.select_nth_unstable(middle).1 };
        metrics::AttachHistogram { count: self.count, total: self.total, median, lag: self.lag }
    }
}

#[cfg(test)]
mod tests {
    use super::{AttachTimes, REMEMBERED};
    use std::time::Duration;

    #[test]
    fn the_median_is_of_the_last_attachments_and_the_sum_of_all() {
        let mut attaching = AttachTimes::default();
        assert_eq!(attaching.figures().median, Duration::ZERO);
        attaching.on_attached(Duration::from_secs(1));
        for _ in 0..REMEMBERED {
            attaching.on_attached(Duration::from_millis(2));
        }
        let figures = attaching.figures();
        assert_eq!((figures.count, figures.median), (REMEMBERED as u64 + 1, Duration::from_millis(2)));
        assert_eq!(figures.total, Duration::from_millis(1_000 + 2 * REMEMBERED as u64));
        assert_eq!(attaching.last.len(), REMEMBERED);
    }
}
