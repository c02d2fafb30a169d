//! The recent load of workers.

use std::time::Duration;

use metadata_datapath::worker::LoopStats;

/// The load of each worker, from two readings of its clock a few seconds apart.
#[derive(Debug, Default)]
pub(super) struct Loads(Vec<Load>);

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    elapsed: Duration,
    awake: Duration,
    last: f64,
}

impl Loads {
    /// Reads the clocks of all workers, in the order of their hubs.
    pub(super) fn note(&mut self, workers: impl Iterator<Item = LoopStats>) {
        for (at, LoopStats { elapsed, slept, .. }) in workers.enumerate() {
            let awake = elapsed.saturating_sub(slept);
            // A worker is busy while it starts, so the time before the first reading does not count.
            if at == self.0.len() {
                self.0.push(Load { elapsed, awake, last: 0.0 });
            }
            let load = &mut self.0[at];
            let (over, of) = (elapsed.saturating_sub(load.elapsed), awake.saturating_sub(load.awake));
            // If the worker has published nothing since the last reading, its last load stays.
            if !over.is_zero() {
                *load = Load { elapsed, awake, last: of.as_secs_f64() / over.as_secs_f64() };
            }
        }
    }

    /// The fraction of the time between the last two readings in which a worker was awake, 0 to 1.
    pub(super) fn of(&self, hub: usize) -> f64 {
        self.0.get(hub).map_or(0.0, |load| load.last.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::Loads;
    use metadata_datapath::worker::LoopStats;
    use std::time::Duration;

    #[test]
    fn a_load_covers_the_time_between_two_readings_and_is_0_before_them() {
        let look = |elapsed, slept| LoopStats {
            elapsed: Duration::from_secs(elapsed),
            slept: Duration::from_secs(slept),
            ..LoopStats::default()
        };
        let mut loads = Loads::default();
        assert_eq!(loads.of(0), 0.0);
        for (elapsed, slept, load) in [(10, 0, 0.0), (20, 5, 0.5), (20, 5, 0.5), (24, 5, 1.0)] {
            loads.note([look(elapsed, slept)].into_iter());
            assert_eq!(loads.of(0), load, "after {elapsed} s");
        }
    }
}
