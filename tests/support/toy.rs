//! A service for tests of the layers below. Its exchanges follow commands, one per line.
//!
//! | command | effect |
//! |---|---|
//! | `far N` | sends N bytes |
//! | `near N` | sends N bytes with a hop limit of 1 |
//! | `park N` | waits for a change of the board, for at most N seconds, then sends the board's value in a line |
//! | `write N` | sets the board to N, wakes waiting exchanges, and sends `ok` |
//! | `close` | closes its side and reads no more |
//! | `abort` | resets the connection |
//! | `storm` | waits; at each change of the board, adds one to it and wakes waiting exchanges, which causes an endless chain |
//!
//! When the guest closes its side, the exchange closes.

use bytes::Bytes;
use metadata_common::addresses::Connection;
use metadata_common::maps::Slot;
use metadata_common::time::Now;
use metadata_datapath::stack::{ConnectionAction, Exchange, Service, Stack, StackConfig};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Hop limit of the answers to `near`.
pub const NEAR: u8 = 1;

/// The state that all exchanges share.
#[derive(Debug, Default)]
pub struct Board {
    values: Mutex<HashMap<Slot, u64>>,
}

impl Board {
    /// The value for a slot.
    pub fn read(&self, slot: Slot) -> u64 {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).get(&slot).copied().unwrap_or(0)
    }

    /// Sets the value for a slot.
    pub fn write(&self, slot: Slot, value: u64) {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).insert(slot, value);
    }
}

/// The service.
#[derive(Debug)]
pub struct Toy(Arc<Board>);

/// Returns a stack with the service, and its board. Each open exchange holds one reference to the board.
#[must_use]
pub fn stack(config: StackConfig) -> (Stack<Toy>, Arc<Board>) {
    let board = Arc::new(Board::default());
    (Stack::new(config, Toy(Arc::clone(&board))), board)
}

impl Service for Toy {
    type Exchange = Puppet;

    fn listens(&self, _: Slot, (_, port): (IpAddr, u16)) -> bool {
        port == 80
    }

    fn open(&mut self, _: Now, connection: Connection) -> Puppet {
        Puppet {
            board: Arc::clone(&self.0),
            slot: connection.slot,
            heard: Vec::new(),
            doing: Doing::Nothing,
            stirred: false,
            ended: false,
        }
    }
}

/// One exchange.
#[derive(Debug)]
pub struct Puppet {
    board: Arc<Board>,
    slot: Slot,
    heard: Vec<u8>,
    doing: Doing,
    stirred: bool,
    ended: bool,
}

#[derive(Clone, Copy, Debug)]
enum Doing {
    Nothing,
    Parked { seen: u64, until: Duration },
    Storming { seen: u64 },
}

impl Puppet {
    fn line(&mut self) -> Option<String> {
        let end = self.heard.iter().position(|byte| *byte == b'\n')?;
        let line = self.heard.drain(..=end).collect();
        Some(String::from_utf8(line).expect("a test speaks text"))
    }

    fn write_value(&mut self, value: u64) {
        self.board.write(self.slot, value);
        self.stirred = true;
    }

    fn obey(&mut self, now: Now, line: &str) -> Option<ConnectionAction> {
        let (word, number) = line.trim().split_once(' ').unwrap_or((line.trim(), "0"));
        let number: u64 = number.parse().expect("a number");
        let seen = self.board.read(self.slot);
        let bytes = || Bytes::from(vec![b'.'; number as usize]);
        match word {
            "far" => return Some(ConnectionAction::Send(bytes())),
            "near" => return Some(ConnectionAction::SendWithin { bytes: bytes(), hop_limit: NEAR }),
            "park" => self.doing = Doing::Parked { seen, until: now.mono + Duration::from_secs(number) },
            "close" => return Some(ConnectionAction::Close),
            "abort" => return Some(ConnectionAction::Abort),
            "storm" => self.doing = Doing::Storming { seen },
            "write" => {
                self.write_value(number);
                return Some(ConnectionAction::Send(Bytes::from_static(b"ok\n")));
            }
            other => panic!("unknown command: {other}"),
        }
        None
    }
}

impl Exchange for Puppet {
    fn receive(&mut self, _: Now, bytes: &[u8]) -> usize {
        self.heard.extend_from_slice(bytes);
        bytes.len()
    }

    fn finish(&mut self, _: Now) {
        self.ended = true;
    }

    fn next(&mut self, now: Now) -> ConnectionAction {
        if self.ended {
            return ConnectionAction::Close;
        }
        let says = self.board.read(self.slot);
        match self.doing {
            Doing::Parked { seen, until } if says == seen && now.mono < until => {
                return ConnectionAction::Wait { until: Some(until) };
            }
            Doing::Parked { .. } => {
                self.doing = Doing::Nothing;
                return ConnectionAction::Send(format!("{says}\n").into());
            }
            Doing::Storming { seen } => {
                if says != seen {
                    self.write_value(says + 1);
                    self.doing = Doing::Storming { seen: says + 1 };
                }
                return ConnectionAction::Wait { until: None };
            }
            Doing::Nothing => {}
        }
        while let Some(line) = self.line() {
            if let Some(step) = self.obey(now, &line) {
                return step;
            }
            if !matches!(self.doing, Doing::Nothing) {
                return self.next(now);
            }
        }
        ConnectionAction::Wait { until: None }
    }

    fn is_waiting(&self) -> bool {
        matches!(self.doing, Doing::Parked { .. })
    }

    fn stirs(&mut self) -> bool {
        std::mem::take(&mut self.stirred)
    }
}
