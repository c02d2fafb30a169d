//! Many connections of one guest at once, each as slow, greedy or silent as the test requires.

use crate::raw::Segment;
use crate::station::{PATIENCE, Station, Talk};
use anyhow::{Result, ensure};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Payload of one segment, in bytes.
const SEGMENT: usize = 1_400;
/// Time until an unacknowledged segment is sent again.
const AGAIN: Duration = Duration::from_millis(500);
/// Number of SYNs to send before the answers are read.
const SYNS: usize = 64;

/// Connections of one guest.
#[derive(Debug)]
pub struct Mob<'s> {
    /// The guest.
    pub station: &'s mut Station,
    /// Its connections, by index.
    pub talks: Vec<Talk>,
    /// Peak number of bytes that the service had acknowledged on connections without an answer.
    pub most_held: usize,
}

impl<'s> Mob<'s> {
    /// Opens this many connections.
    ///
    /// # Errors
    /// When an answer is missing.
    pub fn open(station: &'s mut Station, to: (IpAddr, u16), count: usize) -> Result<Self> {
        Self::open_with(station, to, count, |_| {})
    }

    /// Opens connections after `change` has adapted them.
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
            ensure!(start.elapsed() < PATIENCE, "a handshake has no answer after {PATIENCE:?}");
            for at in 0..mob.talks.len() {
                if !mob.talks[at].open {
                    mob.station.transmit(&mob.talks[at].syn())?;
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
    /// As for [`Station::transmit`].
    pub fn transmit(&self, segment: &Segment) -> Result<()> {
        self.station.transmit(segment)
    }

    /// Waits for segments, for `most` at the longest, and processes them. Acknowledges them if `acknowledges` is true.
    /// Returns their number.
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn listen(&mut self, most: Duration, acknowledges: bool) -> Result<usize> {
        if !most.is_zero() {
            self.station.wait(most);
        }
        let replies = self.station.segments()?;
        for reply in &replies {
            let Some(talk) = self.talks.iter_mut().find(|talk| talk.is_theirs(reply)) else { continue };
            if talk.take(reply) && acknowledges {
                let ack = talk.ack();
                self.station.transmit(&ack)?;
            }
        }
        Ok(replies.len())
    }

    /// Receives until `done` returns true, for `most` at the longest. Returns the last result of `done`.
    ///
    /// # Errors
    /// As for [`Station::receive`].
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

    /// Sends this many bytes on every open connection while the service accepts them, for `most` at the longest. The
    /// bytes are produced on demand. Returns the number of acknowledged bytes.
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn pour(&mut self, bytes: usize, most: Duration, make: impl Fn(usize) -> u8) -> Result<u64> {
        let first: Vec<u32> = self.talks.iter().map(|talk| talk.seq).collect();
        // Unacknowledged segments, and when each was last sent.
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
                is_over &= done >= bytes && segments.is_empty();
                let room = talk.room.saturating_sub(talk.in_flight()).min(SEGMENT);
                if done < bytes && room > 0 {
                    let part: Vec<u8> = (done..bytes.min(done + room)).map(&make).collect();
                    segments.extend(talk.transmit(&part));
                    *sent = Instant::now() - AGAIN;
                }
                if !segments.is_empty() && sent.elapsed() >= AGAIN {
                    segments.iter().try_for_each(|segment| self.station.transmit(segment))?;
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

    /// Ends all connections. A connection gets a FIN if the service has closed its side and acknowledged everything.
    /// All others get a reset with the number that the service expects. A FIN is repeated until it is acknowledged,
    /// because the port's limit can drop it. An accepted reset gets no answer. A reset that crosses an acknowledgement
    /// gets a challenge (RFC 5961 §3.2). The reset is repeated with the challenge's number (RFC 9293 §3.10.7.1).
    ///
    /// # Errors
    /// As for [`Station::receive`].
    pub fn leave(self) -> Result<()> {
        let open = self.talks.into_iter().filter(|talk| talk.open && !talk.reset);
        let (mut finished, given_up): (Vec<_>, Vec<_>) =
            open.partition(|talk| talk.ended && talk.in_flight() == 0);
        for talk in &given_up {
            self.station.transmit(&Segment { seq: talk.acknowledged, ..talk.reset() })?;
        }
        let (start, mut is_challenged) = (Instant::now(), !given_up.is_empty());
        while (!finished.is_empty() || is_challenged) && start.elapsed() < PATIENCE {
            finished.iter().try_for_each(|talk| self.station.transmit(&talk.finish()))?;
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
                        self.station.transmit(&Segment { seq: reply.ack, ..talk.reset() })?;
                    }
                }
            }
        }
        Ok(())
    }
}
