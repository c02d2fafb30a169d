//! Leaving a node, to nobody or to another agent, and taking one over: what the control side does of it.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use tracing::{debug, warn};

use super::{IdentityName, Node};
use metadata_base::port::PortName;
use metadata_base::time::Now;
use metadata_content::http::{Headers, Request, Response, Target};
use metadata_content::store::Outcome;
use metadata_datapath::stack::StackStats;
use metadata_datapath::worker::{ControlError, WorkerHandle};
use metadata_serve::{Answer, Answers as _, Question};
use metadata_steer::SteerError;

/// Those that are bound elsewhere than where they are `there`, or not at all.
fn moved<'a>(
    bound: impl Iterator<Item = (&'a IdentityName, Slot)>,
    there: impl Fn(&PortName) -> Vec<(Mac, Slot)>,
) -> Vec<(IdentityName, Slot)> {
    let is_there = |(who, slot): &(&IdentityName, Slot)| there(&who.port).contains(&(who.mac, *slot));
    bound.filter(|who| !is_there(who)).map(|(who, slot)| (who.clone(), slot)).collect()
}

impl Node {
    /// Has every worker drain for `limit` at most, and leave connections that would begin to the next agent.
    ///
    /// # Errors
    /// A worker cannot be told. Those told before drain all the same.
    pub fn drain(&self, limit: Duration) -> Result<(), ControlError> {
        self.each(|worker| worker.drain(limit, None))
    }

    /// Has every worker drain for `limit` at most, claim what it has, and claim what begins.
    ///
    /// # Errors
    /// There are no descriptors left, or a worker cannot be told. Those told before drain all the same.
    pub fn drain_and_claim(&self, limit: Duration) -> anyhow::Result<()> {
        for worker in &self.workers {
            worker.drain(limit, Some(Box::new(self.steering.claims()?)))?;
        }
        Ok(())
    }

    /// Has every worker go on as before a drain, and forgets what was claimed.
    ///
    /// # Errors
    /// A worker cannot be told: it drains on.
    pub fn resume(&mut self) -> Result<(), ControlError> {
        if let Err(error) = self.steering.clear_claims() {
            warn!("claims stay until the next handover: {error}");
        }
        self.each(WorkerHandle::resume)
    }

    /// Has every worker let be what it does not know, which may be another agent's, or ends that.
    ///
    /// # Errors
    /// A worker cannot be told.
    pub fn spare_unknown(&self, spare: bool) -> Result<(), ControlError> {
        self.each(|worker| worker.spare_unknown(spare))
    }

    /// Connections the workers have left to drain; `None` until each has claimed all it has. A worker that has ended has
    /// none.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        let of = |worker: &WorkerHandle<_>| worker.left().or_else(|| worker.is_finished().then_some(0));
        self.workers.iter().map(of).sum()
    }

    /// True once no worker drains any more.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        self.workers.iter().all(|worker| worker.left().is_none())
    }

    fn each(
        &self,
        tell: impl Fn(&WorkerHandle<StackStats>) -> Result<(), ControlError>,
    ) -> Result<(), ControlError> {
        self.workers.iter().map(tell).fold(Ok(()), Result::and)
    }

    /// The side of this agent's hubs.
    #[must_use]
    pub fn side(&self) -> u32 {
        self.steering.side()
    }

    /// Reads token keys, what guests wrote and what is registered again: another agent kept them until now.
    pub fn reload_state(&mut self) {
        self.state.reload();
        self.read_registered();
    }

    /// Takes the ports over from the agent that has them. Its identities keep their slots; what it has bound that no record
    /// names goes, and what it has not is bound.
    ///
    /// # Errors
    /// When the kernel refuses a change; it is worth another try.
    pub fn take_over(&mut self) -> Result<(), SteerError> {
        self.follow_slots()?;
        self.steering.take_over_all()?;
        // Its ports are limited as it was told, and it may have been told something else.
        self.steering.set_limits(self.steering.limits())?;
        self.slots.reserve(self.steering.identities().iter().map(|bound| bound.slot));
        for port in self.plan.ports().cloned().collect::<Vec<_>>() {
            self.go_on_with(&port);
            self.touched.insert(port);
        }
        Ok(())
    }

    /// Brings slots to what the other agent has bound by now, before any of its frames come here: a slot that it has given
    /// to another guest since we looked must not be answered with the last one's record. Who has none yet is held.
    fn follow_slots(&mut self) -> Result<(), SteerError> {
        self.steering.look_again()?;
        let bound = self.bound.iter().map(|(who, bound)| (who, bound.slot));
        for (who, slot) in moved(bound, |port| self.steering.bound_on(port)) {
            debug!(port = %who.port, mac = %who.mac, slot, "another slot since we looked");
            self.bound.remove(&who);
            self.empty(&who, slot, true);
        }
        let ready: HashSet<_> = self.bound.values().map(|bound| bound.slot).collect();
        for identity in self.steering.identities() {
            if !ready.contains(&identity.slot)
                && let Err(error) = self.store.expect(identity.slot)
            {
                warn!(slot = identity.slot, "{error}");
            }
        }
        Ok(())
    }

    /// Another agent has taken the ports.
    pub fn handed_over(&mut self) {
        self.steering.handed_over();
    }

    /// The agent that was taken over from has gone.
    ///
    /// # Errors
    /// When the kernel refuses a change; it is worth another try.
    pub fn finish_take_over(&mut self) -> Result<(), SteerError> {
        self.steering.finish_take_over()
    }

    /// Answers a question of a guest that is still with the agent that was taken over from; `None` while there is
    /// nothing to say. A request that would wait for a change is answered with what there is.
    pub fn answer(&mut self, question: &Question) -> Option<Response> {
        let fields: Vec<_> = question
            .headers
            .iter()
            .map(|(name, value)| httparse::Header { name: name.as_str(), value: value.as_slice() })
            .collect();
        let request = Request {
            method: question.method,
            target: Target { path: &question.path, query: &question.query },
            headers: Headers::new(&fields),
            body: &question.body,
        };
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = Now { mono: self.started.elapsed(), unix_seconds: unix.as_secs() };
        let connection = &question.connection;
        let mut said = self.store.answer(now, connection, &request, None);
        if let Answer::Known(Outcome::Park(mut parked)) = said {
            parked.until = now.mono;
            said = self.store.answer(now, connection, &request, Some(&parked));
        }
        match said {
            Answer::Known(Outcome::Ready(response)) => Some(response),
            Answer::Known(Outcome::Changed(response)) => {
                self.wake(connection.slot);
                Some(response)
            }
            Answer::Unknown => Some(Response::error(metadata_content::http::Status(404), &[])),
            Answer::Known(Outcome::Park(_)) | Answer::NotYet | Answer::TooMany => None,
        }
    }

    /// Has requests of a slot that wait look again.
    pub(in crate::agent) fn look_again(&mut self, slot: Slot) {
        self.wake(slot);
    }

    /// Ends this agent's part after another has taken over: nothing of the ports is changed.
    pub fn leave(self) {
        let Self { workers, steering, .. } = self;
        drop(workers);
        steering.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::{IdentityName, Mac, PortName, moved};

    #[test]
    fn who_has_another_slot_or_none_with_the_other_agent_is_served_by_the_old_one_no_more() {
        let who =
            |port: &str, last| IdentityName { port: PortName::local(port), mac: Mac([2, 0, 0, 0, 0, last]) };
        let ours =
            [(who("stays", 1), 1), (who("swapped", 1), 2), (who("swapped", 2), 3), (who("gone", 1), 4)];
        let there = |port: &PortName| match port.ifname.as_str() {
            "stays" => vec![(Mac([2, 0, 0, 0, 0, 1]), 1), (Mac([2, 0, 0, 0, 0, 9]), 4)],
            "swapped" => vec![(Mac([2, 0, 0, 0, 0, 1]), 3), (Mac([2, 0, 0, 0, 0, 2]), 2)],
            _ => vec![],
        };
        let found = moved(ours.iter().map(|(who, slot)| (who, *slot)), there);
        assert_eq!(found, ours[1..]);
    }
}
