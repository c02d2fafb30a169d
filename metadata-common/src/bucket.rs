//! The token bucket of a port, so that one guest's flood cannot starve its neighbours.
//!
//! Kept as the generic cell rate algorithm does (ITU-T I.371 annex A): instead of counting tokens and
//! refilling them, the bucket remembers when it will be full again. A frame moves that moment on by its
//! cost, and is refused if that would put it further ahead of now than the bucket is deep.

use crate::maps::Port;

/// When the bucket will be full again if one frame is taken at `now_ns`; `None` if it holds too little.
///
/// A refused frame costs nothing. With `frame_ns` 0 every frame is taken. Two CPUs that read the same
/// state at once charge for one frame instead of two, so a guest that spreads its frames over *n* queues
/// is held to at most *n* times its rate.
#[inline(always)]
#[must_use]
pub const fn take(port: Port, now_ns: u64) -> Option<u64> {
    let start = if port.full_at_ns > now_ns { port.full_at_ns } else { now_ns };
    let full_at_ns = start.saturating_add(port.frame_ns);
    if port.frame_ns == 0 {
        Some(port.full_at_ns)
    } else if full_at_ns - now_ns <= port.depth_ns {
        Some(full_at_ns)
    } else {
        None
    }
}

impl Port {
    /// A full bucket that refills at `frames_per_second` and holds `burst` frames.
    ///
    /// A rate of 0 means no limit; a burst of 0 holds one frame. Rates above 10⁹ count as 10⁹.
    #[must_use]
    pub const fn with_limit(frames_per_second: u32, burst: u32) -> Self {
        const NANOS: u64 = 1_000_000_000;
        let frame_ns = match frames_per_second {
            0 => 0,
            rate if rate as u64 > NANOS => 1,
            rate => NANOS / rate as u64,
        };
        let burst = if burst == 0 { 1 } else { burst as u64 };
        Self { frame_ns, depth_ns: frame_ns * burst, full_at_ns: 0, answers: 0, steered: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::take;
    use crate::maps::Port;

    /// Offers one frame at each moment; how many were taken.
    fn taken(port: &mut Port, moments: impl Iterator<Item = u64>) -> usize {
        moments
            .filter(|now| match take(*port, *now) {
                Some(full_at_ns) => {
                    port.full_at_ns = full_at_ns;
                    true
                }
                None => false,
            })
            .count()
    }

    #[test]
    fn a_full_bucket_takes_a_burst_and_no_more() {
        let mut port = Port::with_limit(1_000, 8);
        assert_eq!(taken(&mut port, core::iter::repeat_n(5_000_000, 100)), 8);
    }

    #[test]
    fn an_empty_bucket_refills_at_its_rate() {
        let mut port = Port::with_limit(1_000, 8);
        taken(&mut port, core::iter::repeat_n(0, 100));
        assert_eq!(taken(&mut port, core::iter::once(999_999)), 0);
        assert_eq!(taken(&mut port, core::iter::repeat_n(1_000_000, 10)), 1);
        assert_eq!(taken(&mut port, core::iter::repeat_n(4_000_000, 10)), 3);
    }

    #[test]
    fn a_flood_is_held_to_rate_and_burst() {
        let mut port = Port::with_limit(10_000, 2_048);
        // A million frames a second for one second.
        assert_eq!(taken(&mut port, (0..1_000_000).map(|us| us * 1_000)), 2_048 + 9_999);
    }

    #[test]
    fn idleness_never_saves_more_than_the_depth() {
        let mut port = Port::with_limit(1_000, 8);
        taken(&mut port, core::iter::repeat_n(0, 8));
        assert_eq!(taken(&mut port, core::iter::repeat_n(u64::MAX / 2, 100)), 8);
    }

    #[test]
    fn no_rate_means_no_limit() {
        let mut port = Port::with_limit(0, 1);
        assert_eq!(taken(&mut port, core::iter::repeat_n(0, 10_000)), 10_000);
    }

    #[test]
    fn the_end_of_time_refuses_instead_of_wrapping() {
        let port = Port { frame_ns: 1_000, depth_ns: 1_000, full_at_ns: u64::MAX, answers: 0, steered: 0 };
        assert_eq!(take(port, 0), None);
        assert_eq!(take(port, u64::MAX), Some(u64::MAX));
    }

    #[test]
    fn extreme_limits_stay_within_their_types() {
        assert_eq!(Port::with_limit(u32::MAX, u32::MAX).frame_ns, 1);
        assert_eq!(Port::with_limit(1, u32::MAX).depth_ns, u64::from(u32::MAX) * 1_000_000_000);
        assert_eq!(Port::with_limit(1, 0).depth_ns, 1_000_000_000);
    }
}
