//! Guests that are TCP clients of our own, as in a storm: in turn, they close their connections once they have their
//! answers, and leave that to the service.

use super::site::Site;
use super::{Found, Job, Tell};
use crate::storm::guest::stall::DESCRIBED;
use crate::storm::guest::{Arrival, Orders, Pump};
use anyhow::Result;
use std::time::Instant;

/// Requests of a guest in one storm: the guest that takes longest holds up the next storm, so not few, and a storm
/// ends within minutes.
const REQUESTS: u64 = 250;

/// Lets all guests ask until all answers have come.
pub(super) fn haul(site: &Site, job: &Job, tell: &mut Tell) -> Result<Found> {
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
        tell.progress(found.answered, found.stalls.count);
    }
    Ok(found)
}
