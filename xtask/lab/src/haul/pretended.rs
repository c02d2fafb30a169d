//! Guests with the storm's own simulated TCP clients. In alternate rounds, the guests and the service close the
//! connections.

use super::site::Site;
use super::{Found, Job, ProgressLines};
use crate::storm::guest::stall::DESCRIBED;
use crate::storm::guest::{Arrival, Orders, Pump};
use anyhow::Result;
use std::time::Instant;

/// Requests of each guest in one storm. All guests wait for the slowest one before the next storm, so there should be
/// many requests; but a storm should end within minutes.
const REQUESTS: u64 = 250;

/// Runs all guests until all answers have arrived.
pub(super) fn haul(site: &Site, job: &Job, progress: &mut ProgressLines) -> Result<Found> {
    let _agent = site.serve()?;
    let mut pump = Pump::new(&site.taps)?;
    let mut found = Found::default();
    let (mut asked, mut rounds) = (0, 0);
    while asked < job.answers && Instant::now() < job.end {
        let requests = (job.answers - asked).div_ceil(job.guests as u64).min(REQUESTS);
        let to_the_end = rounds % 2 == 1;
        let request = if to_the_end { site.closing_request() } else { site.plan.requests[0].clone() };
        let mut plan = site.plan.clone();
        plan.requests = vec![request; requests as usize];
        plan.guests.iter_mut().for_each(|it| it.answers = vec![it.answers[0]; requests as usize]);
        pump.load(plan)?;
        let orders = Orders {
            guests: job.guests,
            arrival: Arrival::AtOnce,
            seconds: 0.0,
            keep_alive: false,
            to_the_end,
            any_bytes: false,
            retries: 0,
            loss: job.loss,
            slow: 0,
            flood: None,
            stall: job.limit,
            seed: job.seed.wrapping_add(rounds),
        };
        let (tally, _) = pump.storm(&orders, &mut |_, _| {})?;
        asked += requests * job.guests as u64;
        rounds += 1;
        found.answered += tally.requests;
        for (failure, times) in tally.reasons {
            *found.failed.entry(format!("{failure:?}").to_lowercase()).or_default() += times;
        }
        let (stalls, more) = (&mut found.stalls, tally.stalls);
        stalls.count += more.count;
        stalls.excused += more.excused;
        stalls.longest = stalls.longest.max(more.longest);
        let room = DESCRIBED - stalls.described.len();
        stalls.described.extend(more.described.into_iter().take(room));
        progress.report(found.answered, found.stalls.count);
    }
    Ok(found)
}
