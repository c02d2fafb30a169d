//! Guests with Linux's own TCP, each in a namespace behind its tap. A guest uses one connection after the other.
//! Connections are closed in three ways in turn: by the service, by the service after the guest has closed its half,
//! and by the guest.

use super::site::Site;
use super::{Found, Job, ProgressLines};
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

/// A guest gives a connection up if nothing arrives for this time.
const GIVES_UP: Duration = Duration::from_secs(30);
/// Interval at which all guests are checked for stalls.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// The most bytes of one read.
const READ: usize = 256 << 10;

/// The side that closes a connection.
#[derive(Clone, Copy)]
enum Ending {
    /// The service closes, and the guest reads to the end.
    Service,
    /// The service closes, after the guest closed its half right after the request.
    HalfClosed,
    /// The guest closes once it has the answer.
    Guest,
}

const ENDINGS: [Ending; 3] = [Ending::Service, Ending::HalfClosed, Ending::Guest];

/// The state of one guest, shared by its own thread and the thread that checks for stalls.
struct Lane {
    guest: Guest,
    recent: Arc<Mutex<Recent>>,
    state: Mutex<State>,
}

/// The progress of a guest.
#[derive(Default)]
struct State {
    /// The time of the current connection's last progress; `None` without a connection.
    since: Option<Nanos>,
    port: u16,
    answered: u64,
    watch: Watch,
}

/// The state that all guests share.
struct Shared<'a> {
    job: &'a Job,
    began: Instant,
    /// The request, and the same request with `Connection: close`.
    requests: [&'a str; 2],
    bodies: &'a [u8],
    /// Requests begun, and guests whose thread still runs.
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

    /// Returns the next request's number, or `None` if there are no more requests.
    fn next(&self) -> Option<u64> {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        (number < self.job.answers && Instant::now() < self.job.end).then_some(number)
    }

    /// Records that a guest's connection made progress. `goes_on` is false if the connection is over.
    fn progressed(&self, lane: &Lane, goes_on: bool) {
        let lost = lock(&lane.recent).lost;
        let mut state = lock(&lane.state);
        let now = self.now();
        if let Some(since) = state.since.replace(now) {
            state.watch.progressed(now - since, lost, self.limit(), &mut lock(&self.stalls));
        }
        state.since = state.since.filter(|_| goes_on);
    }

    /// Records a stall if a guest waits for too long.
    fn check(&self, lane: &Lane) {
        let lost = lock(&lane.recent).lost;
        let overdue = |state: &State| {
            let waited = self.now().saturating_sub(state.since?);
            state.watch.overdue(waited, lost, self.limit())
        };
        if overdue(&lock(&lane.state)).is_none() {
            return;
        }
        let sockets = lane.guest.ns().output(Command::new("ss").args(["-H", "-t", "-i", "-n", "-o"]));
        let sockets = sockets.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        let mut state = lock(&lane.state);
        let Some((lost, since)) = overdue(&state).zip(state.since) else { return };
        let stall = Stall {
            connection: format!("{}:{}", lane.guest.identity().address, state.port),
            answers: state.answered,
            seconds: seconds(self.now().saturating_sub(since)),
            lost,
            segments: lock(&lane.recent).lines(),
            sockets: sockets.unwrap_or_else(|error| format!("{error:#}")),
        };
        state.watch.stalls(stall, &mut lock(&self.stalls));
    }
}

/// Runs all guests until all answers have arrived.
pub(super) fn haul(site: &Site, job: &Job, progress: &mut ProgressLines) -> Result<Found> {
    let agent = site.serve()?;
    let closing = site.closing_request();
    let bodies = std::fs::read(&site.plan.bodies).context("cannot read the file of bodies")?;
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
    let answered = || lanes.iter().map(|lane| lock(&lane.state).answered).sum();
    std::thread::scope(|scope| {
        for (number, lane) in lanes.iter().enumerate() {
            let (shared, expected) = (&shared, site.expected(number));
            scope.spawn(move || {
                let _ends = Busy(&shared.busy);
                lane.guest.ns().run_in(|| ask(shared, lane, expected));
            });
        }
        while shared.busy.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(CHECK_INTERVAL);
            lanes.iter().for_each(|lane| shared.check(lane));
            progress.report(answered(), lock(&shared.stalls).count);
        }
    });
    drop(agent);
    let answered = answered();
    let take = |failed: Mutex<_>| failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let stalls = shared.stalls.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(Found { answered, failed: take(shared.failed), stalls })
}

/// Counts a guest as busy until it is dropped at the end of the guest's thread.
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
    // Frames of address resolution are lost as often as others. More than the usual three tries keep this from failing
    // requests.
    for (name, value) in [("mcast_solicit", "20"), ("ucast_solicit", "20"), ("retrans_time_ms", "100")] {
        guest.ns().sysctl(&format!("ipv4/neigh/{NIC}/{name}"), value)?;
    }
    Ok(Lane { guest, recent, state: Mutex::default() })
}

/// Makes the requests of a guest, on a thread in the guest's namespace.
fn ask(shared: &Shared<'_>, lane: &Lane, expected: &Expected) {
    let mut buffer = vec![0; READ];
    while let Some(number) = shared.next() {
        let ending = ENDINGS[number as usize % ENDINGS.len()];
        shared.progressed(lane, true);
        let fetched = fetch(shared, lane, ending, expected, &mut buffer);
        shared.progressed(lane, false);
        match fetched {
            Ok(()) => lock(&lane.state).answered += 1,
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
    lock(&lane.state).port = stream.local_addr()?.port();
    stream.set_read_timeout(Some(GIVES_UP))?;
    let request = shared.requests[usize::from(!matches!(ending, Ending::Guest))];
    stream.write_all(request.as_bytes()).context("send the request")?;
    if matches!(ending, Ending::HalfClosed) {
        stream.shutdown(Shutdown::Write).context("close one half")?;
    }
    let (mut answer, mut is_done) = (Answer::default(), false);
    loop {
        let length = stream.read(buffer).context(if is_done { "read up to the end" } else { "read" })?;
        shared.progressed(lane, true);
        if length == 0 {
            ensure!(is_done, "the connection ended before the answer");
            return Ok(());
        }
        ensure!(!is_done, "bytes follow the answer");
        match answer.feed(&buffer[..length], expected, shared.bodies) {
            Progress::More => {}
            Progress::Done { .. } if matches!(ending, Ending::Guest) => return Ok(()),
            Progress::Done { .. } => is_done = true,
            Progress::Wrong(failure) => bail!("wrong answer: {failure:?}"),
        }
    }
}
