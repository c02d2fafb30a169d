//! The part of a response head that depends on the moment and the connection: `Date`, `Connection` and the
//! blank line, rendered once a second.

use bytes::Bytes;
use std::cell::RefCell;
use std::time::{Duration, UNIX_EPOCH};

/// 9999-12-31T23:59:59Z, the last moment an IMF-fixdate can name (RFC 9110 §5.6.7).
const LAST_SECOND: u64 = 253_402_300_799;

/// What a response says about its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// Nothing: an HTTP/1.1 connection stays open.
    Implied,
    /// `Connection: keep-alive`, as an HTTP/1.0 client that asked for it expects.
    KeepAlive,
    /// `Connection: close`.
    Close,
}

struct Tails {
    unix_seconds: u64,
    implied: Bytes,
    keep_alive: Bytes,
    close: Bytes,
}

impl Tails {
    fn at(unix_seconds: u64) -> Self {
        let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(unix_seconds.min(LAST_SECOND)));
        let tail = |connection| Bytes::from(format!("Date: {date}\r\n{connection}\r\n"));
        Self {
            unix_seconds,
            implied: tail(""),
            keep_alive: tail("Connection: keep-alive\r\n"),
            close: tail("Connection: close\r\n"),
        }
    }
}

thread_local! {
    static TAILS: RefCell<Option<Tails>> = const { RefCell::new(None) };
}

/// `Date`, `Connection` where it must be said, and the blank line that ends a response head.
#[must_use]
pub fn tail(unix_seconds: u64, persistence: Persistence) -> Bytes {
    TAILS.with_borrow_mut(|tails| {
        let tails = match tails {
            Some(tails) if tails.unix_seconds == unix_seconds => tails,
            stale => stale.insert(Tails::at(unix_seconds)),
        };
        match persistence {
            Persistence::Implied => tails.implied.clone(),
            Persistence::KeepAlive => tails.keep_alive.clone(),
            Persistence::Close => tails.close.clone(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{LAST_SECOND, Persistence, tail};

    #[test]
    fn the_tail_carries_the_date_of_its_second() {
        assert_eq!(tail(784_111_777, Persistence::Implied), "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n");
        assert_eq!(
            tail(784_111_778, Persistence::Close),
            "Date: Sun, 06 Nov 1994 08:49:38 GMT\r\nConnection: close\r\n\r\n"
        );
    }

    #[test]
    fn a_clock_beyond_the_format_is_held_at_its_end() {
        assert_eq!(tail(u64::MAX, Persistence::Implied), tail(LAST_SECOND, Persistence::Implied));
    }
}
