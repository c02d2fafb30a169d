//! `--watch` and `--record`: the storm in the view of `xdp-imds top`.

mod recording;

use anyhow::{Context as _, Result, anyhow, ensure};
use metadata_control::screen::terminal::{self, EndConditions};
use metadata_control::screen::{Screen, TerminalStyle, ViewQuery, fetch, plain};
use recording::Recording;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of questions to the agent.
const EVERY: Duration = Duration::from_millis(250);
/// How long the view continues after the storm, so that it shows the end.
const AFTER: Duration = Duration::from_secs(2);
/// Limit on the wait for the view's end. A read of a terminal that is gone may not end.
const END_WITHIN: Duration = Duration::from_secs(5);

/// The threads that show and record one storm.
pub(super) struct Watch {
    ends: EndConditions,
    view: Option<JoinHandle<std::io::Result<()>>>,
    recorder: Option<JoinHandle<Recording>>,
}

impl Watch {
    /// Watches the agent of a run directory. Ctrl-C and signals set `interrupted`.
    pub(super) fn start(
        run: PathBuf,
        shows: bool,
        records: bool,
        interrupted: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let ends = EndConditions { interrupted: Arc::clone(interrupted), ..EndConditions::default() };
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        let recorder = match records {
            true => {
                let (run, over) = (run.clone(), Arc::clone(&ends.over));
                Some(thread("storm-record").spawn(move || record(&run, &over))?)
            }
            false => None,
        };
        let view = match shows && terminal::can_draw() {
            true => {
                let ends = ends.clone();
                let ask = move |asked: &ViewQuery| fetch(&run, asked).map_err(|error| error.to_string());
                let look = TerminalStyle::of(|name| std::env::var(name).ok());
                let body = move || terminal::run(Screen::default(), look, EVERY, Box::new(ask), ends);
                Some(thread("storm-view").spawn(body)?)
            }
            false => None,
        };
        Ok(Self { ends, view, recorder })
    }

    /// True while the view has the terminal.
    pub(super) fn is_shown(&self) -> bool {
        self.view.as_ref().is_some_and(|view| !view.is_finished())
    }

    /// Ends the view, and writes the recording.
    pub(super) fn finish(mut self, file: Option<&Path>) -> Result<()> {
        std::thread::sleep(AFTER);
        self.end_view()?;
        if let Some(recorder) = self.recorder.take() {
            let recording = recorder.join().map_err(|_| anyhow!("the recorder of the storm panicked"))?;
            let file = file.context("a recording needs a file")?;
            recording.write(file)?;
            eprintln!("wrote {}", file.display());
        }
        Ok(())
    }

    /// Gives the terminal back.
    fn end_view(&mut self) -> Result<()> {
        self.ends.over.store(true, Ordering::Relaxed);
        let Some(view) = self.view.take() else { return Ok(()) };
        let begun = Instant::now();
        while !view.is_finished() {
            ensure!(begun.elapsed() < END_WITHIN, "the view of the storm does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(view.join().map_err(|_| anyhow!("the view of the storm panicked"))??)
    }
}

impl Drop for Watch {
    /// Gives the terminal back after a storm that failed. That error is reported, and one of the view is not.
    fn drop(&mut self) {
        let _ = self.end_view();
    }
}

/// Records until the storm is over.
fn record(run: &Path, over: &AtomicBool) -> Recording {
    let (mut recording, mut screen, began) = (Recording::default(), Screen::default(), Instant::now());
    while !over.load(Ordering::Relaxed) {
        screen.on_answer(fetch(run, &screen.asked()).map_err(|error| error.to_string()));
        recording.push(began.elapsed(), plain(&screen, terminal::SIZE, TerminalStyle::PLAIN));
        std::thread::sleep(EVERY);
    }
    recording
}

/// Parses the file of a recording.
pub(super) fn recording(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "cast") => Ok(path),
        _ => Err("expected a file FILE.svg or FILE.cast".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::recording;

    #[test]
    fn the_name_of_a_recording_gives_its_form() {
        for (text, is_good) in
            [("a.svg", true), ("/b/c.cast", true), ("a.gif", false), ("svg", false), ("", false)]
        {
            assert_eq!(recording(text).is_ok(), is_good, "{text}");
        }
    }
}
