//! What the agent writes of a trace, a line of JSON each: `GET /v1/trace` on the control socket.
//!
//! Empty lines say that the agent is still there. A reader leaves out lines of a kind it does not know.

use serde::{Deserialize, Serialize};

/// The version of these lines.
pub const SCHEMA: &str = "trace/1";

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// The first.
    Begin {
        /// [`SCHEMA`].
        schema: String,
        /// Who is watched, in words.
        who: String,
        /// What of it is not seen, in words.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unseen: Option<String>,
        /// The kernel's monotonic clock, nanoseconds.
        monotonic_ns: u64,
        /// The time of day at that moment, nanoseconds since 1970.
        unix_ns: u64,
    },
    /// A frame.
    Frame(Frame),
    /// So many frames found no room before the next one.
    Lost {
        /// How many.
        frames: u64,
    },
    /// The last, when it is not the reader who ends.
    End {
        /// Why.
        reason: String,
    },
}

/// A frame and what became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// When, on the kernel's monotonic clock, nanoseconds.
    pub time_ns: u64,
    /// It was sent to the guest; else by it.
    pub to_guest: bool,
    /// The verdict, by its name in the metrics.
    pub verdict: String,
    /// Octets of the frame.
    pub length: u32,
    /// The port, as the command line names it; nothing for what comes from user space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// The guest's MAC.
    pub mac: String,
    /// The frame's headers, or all that was captured if that was asked for; hexadecimal.
    pub octets: String,
    /// The request or status line, if a message begins in what was captured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Octets of hexadecimal digits; `None` for anything else.
#[must_use]
pub fn octets(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    pairs
        .map(|pair| {
            u8::from_str_radix(std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?, 16).ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Frame, Line, octets};
    use metadata_base::hex::hex;

    #[test]
    fn lines_keep_their_form() {
        let frame = Frame {
            time_ns: 7,
            verdict: "steer_arp".into(),
            length: 42,
            mac: "m".into(),
            octets: "00ff".into(),
            ..Frame::default()
        };
        let cases = [
            (Line::Lost { frames: 3 }, r#"{"kind":"lost","frames":3}"#),
            (
                Line::Frame(frame),
                r#"{"kind":"frame","time_ns":7,"to_guest":false,"verdict":"steer_arp","length":42,"mac":"m","octets":"00ff"}"#,
            ),
        ];
        for (line, text) in cases {
            assert_eq!(serde_json::to_string(&line).expect("JSON"), text);
            assert_eq!(serde_json::from_str::<Line>(text).expect("a line"), line);
        }
    }

    #[test]
    fn octets_come_back_from_their_digits_and_from_nothing_else() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(octets(&hex(&all)), Some(all));
        for bad in ["0", "0g", "zz", "é"] {
            assert_eq!(octets(bad), None, "{bad}");
        }
    }
}
