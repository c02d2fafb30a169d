//! Many connections of one guest at once, each as slow, greedy or silent as a test has it.

use crate::raw::Segment;
use crate::station::{PATIENCE, Station, Talk};
use anyhow::{Result, ensure};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Octets of one segment.
const SEGMENT: usize = 1_400;
/// Before what nobody acknowledged is sent again.
const AGAIN: Duration = Duration::from_millis(500);
/// SYNs sent before the answers are looked at.
const SYNS: usize = 64;

/// Connections of one guest.
#[derive(Debug)]
pub struct Mob<'s> {
    /// The guest.
    pub station: &'s mut Station,
    /// Its connections, by their number.
    pub talks: Vec<Talk>,
    /// The most octets of requests that the service had taken at one time without having answered yet.
    pub most_held: usize,
}

impl<'s> Mob<'s> {
    /// Shakes hands so many times.
    ///
    /// # Errors
    /// When an answer is missing.
    pub fn open(station: &'s mut Station, to: (IpAddr, u16), count: usize) -> Result<Self> {
        Self::open_with(station, to, count, |_| {})
    }

    /// The same with connections that are changed before they begin.
    ///
    /// # Errors
    /// When an answer is missing.
    pub fn open_with(
        station: &'s mut Station,
        to: (IpAddr, u16),
        count: usize,
        change: impl Fn(&mut Talk),
    ) -> Result<Self> {
        let mut mob = Self { talks: Vec::with_capacity(count), station, most_held: 0 };
        for _ in 0..count {
            let mut talk = mob.station.talk(to);
            change(&mut talk);
            mob.talks.push(talk);
        }
        let start = Instant::now();
        while mob.talks.iter().any(|talk| !talk.open) {
            ensure!(start.elapsed() < PATIENCE, "a handshake is not answered in {PATIENCE:?}");
            for at in 0..mob.talks.len() {
                if !mob.talks[at].open {
                    mob.station.say(&mob.talks[at].syn())?;
                }
                if at % SYNS == SYNS - 1 {
                    mob.listen(Duration::ZERO, true)?;
                }
            }
            let until = Instant::now() + AGAIN;
            while Instant::now() < until && mob.talks.iter().any(|talk| !talk.open) {
                mob.listen(Duration::from_millis(10), true)?;
            }
        }
        Ok(mob)
    }

    /// Sends a segment.
    ///
    /// # Errors
    /// As for [`Station::say`].
    pub fn say(&self, segment: &Segment) -> Result<()> {
        self.station.say(segment)
    }

    /// Takes in what comes within this time, and acknowledges it if so wished. Returns how many segments came.
    ///
    /// # Errors
    /// As for [`Station::hear`].
    pub fn listen(&mut self, most: Duration, acknowledges: bool) -> Result<usize> {
        if !most.is_zero() {
            self.station.wait(most);
        }
        let replies = self.station.segments()?;
        for reply in &replies {
            let Some(talk) = self.talks.iter_mut().find(|talk| talk.is_theirs(reply)) else { continue };
            if talk.take(reply) && acknowledges {
                let ack = talk.ack();
                self.station.say(&ack)?;
            }
        }
        Ok(replies.len())
    }

    /// Listens until `done`, or for `most`. True when it was done.
    ///
    /// # Errors
    /// As for [`Station::hear`].
    pub fn until(&mut self, most: Duration, done: impl Fn(&[Talk]) -> bool) -> Result<bool> {
        let start = Instant::now();
        while start.elapsed() < most {
            if done(&self.talks) {
                return Ok(true);
            }
            self.listen(Duration::from_millis(20), true)?;
        }
        Ok(done(&self.talks))
    }

    /// Says so many octets, made as they are wanted, on every live connection, for as long as the service
    /// takes them; at most for `most`. Returns how many were acknowledged in all.
    ///
    /// # Errors
    /// As for [`Station::hear`].
    pub fn pour(&mut self, octets: usize, most: Duration, make: impl Fn(usize) -> u8) -> Result<u64> {
        let first: Vec<u32> = self.talks.iter().map(|talk| talk.seq).collect();
        // Segments that wait for their acknowledgement, and when they were last sent.
        let mut waiting: Vec<(Vec<Segment>, Instant)> =
            first.iter().map(|_| (Vec::new(), Instant::now())).collect();
        let start = Instant::now();
        let said = |talk: &Talk, first: u32| talk.seq.wrapping_sub(first) as usize;
        while start.elapsed() < most {
            let mut is_over = true;
            for at in 0..self.talks.len() {
                let (segments, sent) = &mut waiting[at];
                let talk = &mut self.talks[at];
                if !talk.is_live() {
                    continue;
                }
                segments.retain(|segment| {
                    let end = segment.seq.wrapping_add(segment.payload.len() as u32);
                    end.wrapping_sub(talk.acknowledged) as i32 > 0
                });
                let done = said(talk, first[at]);
                is_over &= done >= octets && segments.is_empty();
                let room = talk.room.saturating_sub(talk.in_flight()).min(SEGMENT);
                if done < octets && room > 0 {
                    let part: Vec<u8> = (done..octets.min(done + room)).map(&make).collect();
                    segments.extend(talk.say(&part));
                    *sent = Instant::now() - AGAIN;
                }
                if !segments.is_empty() && sent.elapsed() >= AGAIN {
                    segments.iter().try_for_each(|segment| self.station.say(segment))?;
                    *sent = Instant::now();
                }
            }
            if is_over {
                break;
            }
            self.listen(Duration::from_millis(5), true)?;
            let unanswered = self.talks.iter().zip(&first).filter(|(talk, _)| talk.received.is_empty());
            let held = unanswered.filter(|(talk, _)| talk.is_live());
            let held: usize = held.map(|(talk, first)| said(talk, *first) - talk.in_flight()).sum();
            self.most_held = self.most_held.max(held);
        }
        let talks = self.talks.iter().zip(&first).zip(&waiting);
        Ok(talks
            .map(|((talk, first), (segments, _))| {
                let unheard: usize = segments.iter().map(|segment| segment.payload.len()).sum();
                (said(talk, *first) - unheard) as u64
            })
            .sum())
    }

    /// Leaves: a FIN where the service has closed its side and heard all, else a reset with the number it waits for.
    /// A FIN is repeated until it is acknowledged: what exceeds the port's limit is dropped. A reset that is believed is
    /// not answered; one that met an acknowledgement under way is challenged (RFC 5961 §3.2), and sent again with the
    /// number that the challenge names, as any guest does (RFC 9293 §3.10.7.1).
    ///
    /// # Errors
    /// As for [`Station::hear`].
    pub fn leave(self) -> Result<()> {
        let open = self.talks.into_iter().filter(|talk| talk.open && !talk.reset);
        let (mut finished, given_up): (Vec<_>, Vec<_>) =
            open.partition(|talk| talk.ended && talk.in_flight() == 0);
        for talk in &given_up {
            self.station.say(&Segment { seq: talk.acknowledged, ..talk.reset() })?;
        }
        let (start, mut is_challenged) = (Instant::now(), !given_up.is_empty());
        while (!finished.is_empty() || is_challenged) && start.elapsed() < PATIENCE {
            finished.iter().try_for_each(|talk| self.station.say(&talk.finish()))?;
            let said = Instant::now();
            is_challenged = false;
            while !(finished.is_empty() && given_up.is_empty()) && said.elapsed() < AGAIN {
                self.station.wait(Duration::from_millis(10));
                for reply in self.station.segments()? {
                    let is_over = |talk: &Talk| reply.flags.3 || reply.ack == talk.seq.wrapping_add(1);
                    finished.retain(|talk| !(talk.is_theirs(&reply) && is_over(talk)));
                    let challenged = given_up.iter().find(|talk| talk.is_theirs(&reply) && !reply.flags.3);
                    if let Some(talk) = challenged {
                        is_challenged = true;
                        self.station.say(&Segment { seq: reply.ack, ..talk.reset() })?;
                    }
                }
            }
        }
        Ok(())
    }
}
