//! Steady guests. Their taps and records never change, so none of their requests may fail.

use super::shared::{Mark, Shared, add};
use crate::storm::guest::{Arrival, Failure, Orders, Plan, Pump, Tally};
use anyhow::Result;
use support::tap::Tap;

/// The guests keep their connections between requests in one of this many rounds.
const KEEP_ALIVE_EVERY: u64 = 3;
/// Some guests read slowly in one of this many rounds.
const SLOW_EVERY: u64 = 4;
/// Frames are lost in one of this many rounds.
const LOSS_EVERY: u64 = 5;
/// The share of frames lost in such a round, in each direction.
const LOSS: f64 = 0.005;
/// The guests begin within this number of seconds.
const RAMP: f64 = 0.3;

/// Crawls on all taps, with one plan after the other, until the soak is over.
pub(super) fn crawl(shared: &Shared, taps: &[Tap], plans: &[Plan], seed: u64) -> Result<()> {
    let mut pump = Pump::new(taps)?;
    for round in 0.. {
        if shared.is_over() {
            return Ok(());
        }
        let busy = shared.busy();
        let mark = shared.mark();
        pump.load(plans[round as usize % plans.len()].clone())?;
        let orders = Orders {
            guests: taps.len(),
            arrival: Arrival::Ramp(RAMP),
            seconds: 0.0,
            keep_alive: round % KEEP_ALIVE_EVERY == 1,
            retries: 0,
            loss: if round % LOSS_EVERY == 2 { LOSS } else { 0.0 },
            slow: if round % SLOW_EVERY == 3 { taps.len() / 4 } else { 0 },
            flood: None,
            stall: 0.0,
            to_the_end: false,
            any_bytes: false,
            seed: seed.wrapping_add(round),
        };
        let (tally, _) = pump.storm(&orders, &mut |_, _| {})?;
        drop(busy);
        count(shared, &tally, mark, orders.keep_alive);
    }
    Ok(())
}

/// Whether a request failed because of wrong bytes, not because of missing ones.
pub(super) fn is_about_bytes(failure: Failure) -> bool {
    matches!(failure, Failure::Head | Failure::Length | Failure::Body | Failure::Checksum)
}

fn count(shared: &Shared, tally: &Tally, mark: Mark, kept: bool) {
    add(&shared.counts.boots, tally.boots);
    add(&shared.counts.requests, tally.requests);
    let closed = |failure: &Failure| matches!(failure, Failure::Cut | Failure::Reset);
    let only_closed = kept && !shared.was_one_since(mark) && tally.reasons.keys().all(closed);
    if tally.failed == 0 {
    } else if shared.was_undisturbed_since(mark) && !only_closed {
        add(&shared.counts.failed, tally.failed);
        shared.breach(format!(
            "{} requests of steady guests failed while an agent served (kept connections: {kept}): {:?}",
            tally.failed, tally.reasons
        ));
    } else {
        add(&shared.counts.interrupted, tally.failed);
    }
    // Wrong bytes are a breach even while no agent serves.
    let strange = tally.reasons.iter().filter(|(reason, _)| is_about_bytes(**reason));
    for (reason, times) in strange {
        shared.breach(format!("steady guests got wrong bytes: {reason:?}, {times} times"));
    }
}
