//! Sends one netlink request (netlink(7)) and reads its answer, without a runtime or a thread. It is for frequent
//! requests, and for answers that no library parses.

use std::io;

use rtnetlink::sys::Socket;

/// Maximum number of bytes that the kernel returns in one read (Linux: `NLMSG_GOODSIZE`, `netlink_recvmsg`).
const ANSWER: usize = 32 << 10;
/// Limit on reads for one request. The description of a device takes one to two kilobytes.
const ANSWERS: usize = 1_024;

/// `struct nlmsghdr`.
const HEAD: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST`; with `NLM_F_ROOT` and `NLM_F_MATCH` it requests everything there is.
const REQUEST: u16 = 1;
const DUMP: u16 = 0x301;

/// A netlink socket of the namespace in which it was opened.
#[derive(Debug)]
pub struct NetlinkSocket {
    socket: Socket,
    /// The number of the last request.
    asked: u32,
}

impl NetlinkSocket {
    /// Opens a socket of a protocol, such as `NETLINK_ROUTE`.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let socket = Socket::new(protocol)?;
        // The kernel answers before the system call of the request returns.
        socket.set_non_blocking(true)?;
        Ok(Self { socket, asked: 0 })
    }

    /// Sends a request of this kind that lists all objects, and passes kind and body of each message of the answer to
    /// `each`. Blocks while other processes change devices.
    ///
    /// # Errors
    /// If the kernel refuses or does not answer; open another socket then.
    pub fn dump(&mut self, kind: u16, body: &[u8], each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.send(kind, DUMP, body, each)
    }

    /// Like [`dump`](Self::dump), for a request that has one message as its answer.
    ///
    /// # Errors
    /// Like [`dump`](Self::dump).
    pub fn request(&mut self, kind: u16, body: &[u8], each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.send(kind, REQUEST, body, each)
    }

    fn send(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.asked = self.asked.wrapping_add(1);
        let mut question = Vec::with_capacity(HEAD + body.len());
        // A request has a few dozen bytes.
        question.extend(((HEAD + body.len()) as u32).to_ne_bytes());
        question.extend([kind.to_ne_bytes(), flags.to_ne_bytes()].concat());
        question.extend(self.asked.to_ne_bytes());
        question.extend([0; 4]);
        question.extend(body);
        self.socket.send(&question, 0)?;
        let mut answer = Vec::with_capacity(ANSWER);
        for _ in 0..ANSWERS {
            answer.clear();
            self.socket.recv(&mut answer, 0)?;
            match read(&answer, self.asked, &mut each)? {
                Progress::Done => return Ok(()),
                Progress::Some if flags == REQUEST => return Ok(()),
                Progress::Some | Progress::None => {}
            }
        }
        Err(io::Error::other("more devices than the limit of one request"))
    }
}

/// How much of an answer was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// No message.
    None,
    /// At least one message.
    Some,
    /// The last message.
    Done,
}

/// Reads the messages that answer request `number`. Ignores other messages: they belong to the answer of
/// an earlier request that failed.
pub(crate) fn read(
    mut answer: &[u8],
    number: u32,
    each: &mut impl FnMut(u16, &[u8]),
) -> io::Result<Progress> {
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let mut progress = Progress::None;
    while let Some(head) = answer.get(..HEAD) {
        let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let about = u32::from_ne_bytes([head[8], head[9], head[10], head[11]]);
        let body = answer.get(HEAD..length).ok_or_else(short)?;
        match u16::from_ne_bytes([head[4], head[5]]) {
            _ if about != number => {}
            NLMSG_DONE => return Ok(Progress::Done),
            NLMSG_ERROR => {
                let errno = body.first_chunk().map_or(0, |errno| i32::from_ne_bytes(*errno));
                return Err(io::Error::from_raw_os_error(errno.wrapping_neg()));
            }
            kind => {
                each(kind, body);
                progress = Progress::Some;
            }
        }
        answer = answer.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(progress)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{HEAD, NLMSG_DONE, NLMSG_ERROR, Progress, read};
    use std::io;

    pub(crate) fn message(kind: u16, number: u32, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEAD + body.len()).expect("short");
        let mut all = length.to_ne_bytes().to_vec();
        all.extend([kind.to_ne_bytes(), [0; 2]].concat());
        all.extend([number.to_ne_bytes(), [0; 4]].concat());
        all.extend(body);
        all.resize(all.len().next_multiple_of(4), 0);
        all
    }

    fn kinds(answer: &[u8]) -> io::Result<(Vec<u16>, Progress)> {
        let mut kinds = Vec::new();
        let progress = read(answer, 7, &mut |kind, _| kinds.push(kind))?;
        Ok((kinds, progress))
    }

    #[test]
    fn messages_are_read_to_the_end_and_those_of_other_requests_are_ignored() {
        let one = [message(NLMSG_DONE, 6, &[0; 4]), message(16, 6, &[]), message(20, 7, &[0; 5])].concat();
        assert_eq!(kinds(&one).expect("messages"), (vec![20], Progress::Some));
        let all = [one, message(NLMSG_DONE, 7, &[]), message(16, 7, &[])].concat();
        assert_eq!(kinds(&all).expect("messages"), (vec![20], Progress::Done));
        assert_eq!(kinds(&message(16, 6, &[])).expect("a message"), (vec![], Progress::None));
    }

    #[test]
    fn a_refusal_and_a_truncated_answer_are_errors() {
        let refused = kinds(&message(NLMSG_ERROR, 7, &(-libc::EBUSY).to_ne_bytes())).expect_err("refused");
        assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
        let whole = message(16, 7, &[1; 40]);
        for length in HEAD..whole.len() {
            let error = kinds(&whole[..length]).expect_err("cut");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{length}");
        }
        for length in [0_u32, 15, 4_000] {
            let mut wrong = whole.clone();
            wrong[..4].copy_from_slice(&length.to_ne_bytes());
            assert!(kinds(&wrong).is_err(), "{length}");
        }
    }
}
