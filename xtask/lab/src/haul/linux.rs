//! Guests with Linux's own TCP, each in a namespace behind its tap: one connection after the other, ended in turn by
//! the service, by the service after the guest has closed its half, and by the guest.

use super::site::Site;
use super::{Found, Job, Tell};
use crate::storm::guest::stall::{Stall, Stalls, Watch, seconds};
use crate::storm::guest::{Answer, Expected, Nanos, Progress, SECOND};
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use support::guest::{Guest, METADATA, NIC, Spec};
use support::netns::Namespace;
use support::pump::Faults;
use support::recent::Recent;
use support::record::Identity;
use support::tap::Shape;

/// A guest gives a connection up when nothing comes for so long.
const GIVES_UP: Duration = Duration::from_secs(30);
/// Between two looks at all guests.
const LOOK: Duration = Duration::from_millis(20);
/// Octets of one read.
const READ: usize = 256 << 10;

/// Who ends a connection.
#[derive(Clone, Copy)]
enum Ending {
    /// The service, and the guest reads to the end.
    Service,
    /// The same, after the guest has closed its half with the request.
    HalfClosed,
    /// The guest, once it has its answer.
    Guest,
}

const ENDINGS: [Ending; 3] = [Ending::Service, Ending::HalfClosed, Ending::Guest];

/// One guest, as its own thread and the one that looks for stalls see it.
struct Lane {
    guest: Guest,
    recent: Arc<Mutex<Recent>>,
    at: Mutex<At>,
}

/// Where a guest is.
#[derive(Default)]
struct At {
    /// The last progress of the present connection.
    since: Option<Nanos>,
    port: u16,
    answered: u64,
    watch: Watch,
}

/// What all guests share.
struct Shared<'a> {
    job: &'a Job,
    began: Instant,
    /// A request, and the same with the wish that the service close the connection.
    requests: [&'a str; 2],
    bodies: &'a [u8],
    /// Requests begun, and guests that go on.
    begun: AtomicU64,
    busy: AtomicU64,
    stalls: Mutex<Stalls>,
    failed: Mutex<BTreeMap<String, u64>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared<'_> {
    fn now(&self) -> Nanos {
        self.began.elapsed().as_nanos() as Nanos
    }

    fn limit(&self) -> Nanos {
        (self.job.limit * SECOND as f64) as Nanos
    }

    /// The next request's number, if there is one.
    fn next(&self) -> Option<u64> {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        (number < self.job.answers && Instant::now() < self.job.end).then_some(number)
    }

    /// A guest's connection has made progress, or is over.
    fn progressed(&self, lane: &Lane, goes_on: bool) {
        let lost = lock(&lane.recent).lost;
        let mut at = lock(&lane.at);
        let now = self.now();
        if let Some(since) = at.since.replace(now) {
            at.watch.progressed(now - since, lost, self.limit(), &mut lock(&self.stalls));
        }
        at.since = at.since.filter(|_| goes_on);
    }

    /// Notes a guest that waits for too long.
    fn look(&self, lane: &Lane) {
        let lost = lock(&lane.recent).lost;
        let overdue = |at: &At| {
            let waited = self.now().saturating_sub(at.since?);
            at.watch.overdue(waited, lost, self.limit())
        };
        if overdue(&lock(&lane.at)).is_none() {
            return;
        }
        let sockets = lane.guest.ns().output(Command::new("ss").args(["-H", "-t", "-i", "-n", "-o"]));
        let sockets = sockets.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        let mut at = lock(&lane.at);
        let Some((lost, since)) = overdue(&at).zip(at.since) else { return };
        let stall = Stall {
            connection: format!("{}:{}", lane.guest.identity().address, at.port),
            answers: at.answered,
            seconds: seconds(self.now().saturating_sub(since)),
            lost,
            segments: lock(&lane.recent).lines(),
            sockets: sockets.unwrap_or_else(|error| format!("{error:#}")),
        };
        at.watch.stalls(stall, &mut lock(&self.stalls));
    }
}

/// Lets all guests ask until all answers have come.
pub(super) fn haul(site: &Site, job: &Job, tell: &mut Tell) -> Result<Found> {
    let agent = site.serve()?;
    let closing = site.closing_request();
    let bodies = std::fs::read(&site.plan.bodies).context("the bodies")?;
    let began = Instant::now();
    let lanes = (0..job.guests).map(|number| lane(site, job, number, began)).collect::<Result<Vec<_>>>()?;
    let shared = Shared {
        job,
        began,
        requests: [&site.plan.requests[0], &closing],
        bodies: &bodies,
        begun: AtomicU64::new(0),
        busy: AtomicU64::new(lanes.len() as u64),
        stalls: Mutex::default(),
        failed: Mutex::default(),
    };
    let answered = || lanes.iter().map(|lane| lock(&lane.at).answered).sum();
    std::thread::scope(|scope| {
        for (number, lane) in lanes.iter().enumerate() {
            let (shared, expected) = (&shared, site.expected(number));
            scope.spawn(move || {
                let _ends = Busy(&shared.busy);
                lane.guest.ns().run_in(|| ask(shared, lane, expected));
            });
        }
        while shared.busy.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(LOOK);
            lanes.iter().for_each(|lane| shared.look(lane));
            tell.progress(answered(), lock(&shared.stalls).count);
        }
    });
    drop(agent);
    let answered = answered();
    let take = |failed: Mutex<_>| failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let stalls = shared.stalls.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(Found { answered, failed: take(shared.failed), stalls })
}

/// A guest whose thread has not ended.
struct Busy<'a>(&'a AtomicU64);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lane(site: &Site, job: &Job, number: usize, began: Instant) -> Result<Lane> {
    let identity = Identity::of(u16::try_from(number)?);
    let recent = Arc::new(Mutex::new(Recent::default()));
    let faults = Faults::loss(job.loss);
    let spec = Spec {
        shape: Shape::virtio(),
        to_host: faults,
        to_guest: faults,
        seed: job.seed.wrapping_mul(1 << 16).wrapping_add(number as u64),
        recent: Some((Arc::clone(&recent), began)),
        ..Spec::of(&identity)
    };
    let guest = Guest::boot_on(Arc::clone(&site.taps[number]), Namespace::new("guest")?, &spec)?;
    // Address resolution is lost as often as everything else, and its three tries are not what is looked at.
    for (name, value) in [("mcast_solicit", "20"), ("ucast_solicit", "20"), ("retrans_time_ms", "100")] {
        guest.ns().sysctl(&format!("ipv4/neigh/{NIC}/{name}"), value)?;
    }
    Ok(Lane { guest, recent, at: Mutex::default() })
}

/// Asks in the guest's place, on a thread in its namespace.
fn ask(shared: &Shared<'_>, lane: &Lane, expected: &Expected) {
    let mut buffer = vec![0; READ];
    while let Some(number) = shared.next() {
        let ending = ENDINGS[number as usize % ENDINGS.len()];
        shared.progressed(lane, true);
        let fetched = fetch(shared, lane, ending, expected, &mut buffer);
        shared.progressed(lane, false);
        match fetched {
            Ok(()) => lock(&lane.at).answered += 1,
            Err(error) => *lock(&shared.failed).entry(format!("{error:#}")).or_default() += 1,
        }
    }
}

fn fetch(
    shared: &Shared<'_>,
    lane: &Lane,
    ending: Ending,
    expected: &Expected,
    buffer: &mut [u8],
) -> Result<()> {
    let mut stream =
        TcpStream::connect_timeout(&SocketAddr::from((METADATA, 80)), GIVES_UP).context("connect")?;
    shared.progressed(lane, true);
    lock(&lane.at).port = stream.local_addr()?.port();
    stream.set_read_timeout(Some(GIVES_UP))?;
    let request = shared.requests[usize::from(!matches!(ending, Ending::Guest))];
    stream.write_all(request.as_bytes()).context("ask")?;
    if matches!(ending, Ending::HalfClosed) {
        stream.shutdown(Shutdown::Write).context("close a half")?;
    }
    let (mut answer, mut is_done) = (Answer::default(), false);
    loop {
        let length = stream.read(buffer).context(if is_done { "read the end" } else { "read" })?;
        shared.progressed(lane, true);
        if length == 0 {
            ensure!(is_done, "the connection ended before the answer");
            return Ok(());
        }
        ensure!(!is_done, "octets after the answer");
        match answer.feed(&buffer[..length], expected, shared.bodies) {
            Progress::More => {}
            Progress::Done { .. } if matches!(ending, Ending::Guest) => return Ok(()),
            Progress::Done { .. } => is_done = true,
            Progress::Wrong(failure) => bail!("wrong answer: {failure:?}"),
        }
    }
}
