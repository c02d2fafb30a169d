//! The part of a response head that depends on time and connection: `Date`, `Connection` and the blank line. Each
//! thread renders it once per second.

use bytes::Bytes;
use std::cell::RefCell;
use std::time::{Duration, UNIX_EPOCH};

/// 9999-12-31T23:59:59Z, the last time an IMF-fixdate can express (RFC 9110 §5.6.7).
const LAST_SECOND: u64 = 253_402_300_799;

/// `Connection` field of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// No field: an HTTP/1.1 connection stays open.
    Implied,
    /// `Connection: keep-alive`, for an HTTP/1.0 client that requested it.
    KeepAlive,
    /// `Connection: close`: the agent closes the connection after the response.
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

/// Returns `Date`, the `Connection` field if one is needed, and the blank line that ends a response head.
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
    fn the_tail_contains_the_date_of_its_second() {
        assert_eq!(tail(784_111_777, Persistence::Implied), "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n");
        assert_eq!(
            tail(784_111_778, Persistence::Close),
            "Date: Sun, 06 Nov 1994 08:49:38 GMT\r\nConnection: close\r\n\r\n"
        );
    }

    #[test]
    fn a_time_beyond_the_date_format_becomes_its_last_second() {
        assert_eq!(tail(u64::MAX, Persistence::Implied), tail(LAST_SECOND, Persistence::Implied));
    }
}
