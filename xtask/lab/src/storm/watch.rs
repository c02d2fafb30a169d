//! `--watch` and `--record`: the storm in the view of `xdp-imds top`.

use anyhow::{Context as _, Result, anyhow, ensure};
use metadata_control::screen::terminal::{EndConditions, SIZE};
use metadata_control::screen::{Screen, TerminalStyle, ViewQuery, fetch, plain, terminal};
use std::fmt::Write as _;
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
        recording.push(began.elapsed(), plain(&screen, SIZE, TerminalStyle::PLAIN));
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

// A recording of screens, written as an asciicast or as a picture with frames.

/// Limit on recorded screens. When it is reached, every other screen is dropped, and later only every other one is
/// kept.
const SCREENS: usize = 512;
/// Limit on the frames of a picture.
const FRAMES: usize = 48;
/// Seconds that a picture shows its last frame.
const HOLD: f64 = 3.0;
/// Size of a character and of the margin in a picture, in pixels.
const CHARACTER: (f64, f64) = (8.0, 16.0);
const MARGIN: f64 = 8.0;

/// Screens, each with the time since the start.
#[derive(Debug, Default)]
struct Recording {
    screens: Vec<(Duration, String)>,
    /// Every how many screens one is kept, less one, and how many to skip before the next.
    skip: usize,
    skipped: usize,
}

impl Recording {
    /// Adds a screen, unless it is equal to the one before.
    fn push(&mut self, at: Duration, screen: String) {
        if self.screens.last().is_some_and(|(_, last)| *last == screen) {
            return;
        }
        if self.skipped < self.skip {
            self.skipped += 1;
            return;
        }
        self.skipped = 0;
        if self.screens.len() == SCREENS {
            let mut number = 0;
            self.screens.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.skip = 2 * self.skip + 1;
        }
        self.screens.push((at, screen));
    }

    /// Writes the form that the name of the file asks for.
    fn write(&self, file: &Path) -> Result<()> {
        let is_svg = file.extension().is_some_and(|extension| extension == "svg");
        let text = if is_svg { self.svg() } else { self.cast() };
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    /// An asciicast (<https://docs.asciinema.org/manual/asciicast/v2/>). Each event draws the whole screen.
    fn cast(&self) -> String {
        let (width, height) = SIZE;
        let head = serde_json::json!({
            "version": 2, "width": width, "height": height, "title": "A boot storm in xdp-imds top",
        });
        let mut text = format!("{head}\n");
        for (at, screen) in &self.screens {
            let bytes = format!("\x1b[H\x1b[J{}", screen.trim_end().replace('\n', "\r\n"));
            let event = serde_json::json!([at.as_secs_f64(), "o", bytes]);
            let _ = writeln!(text, "{event}");
        }
        text
    }

    /// Evenly chosen screens, the last one included.
    fn frames(&self) -> Vec<&(Duration, String)> {
        let step = self.screens.len().div_ceil(FRAMES).max(1);
        let mut frames: Vec<_> = self.screens.iter().rev().step_by(step).collect();
        frames.reverse();
        frames
    }

    /// A picture that shows one frame after the other, and begins again. A renderer without animation shows the frame
    /// in the middle.
    fn svg(&self) -> String {
        let frames = self.frames();
        let begin = frames.first().map_or(0.0, |(at, _)| at.as_secs_f64());
        let end = frames.last().map_or(0.0, |(at, _)| at.as_secs_f64()) + HOLD;
        let all = (end - begin).max(HOLD);
        let (columns, rows) = SIZE;
        let width = f64::from(columns) * CHARACTER.0 + 2.0 * MARGIN;
        let height = f64::from(rows) * CHARACTER.1 + 2.0 * MARGIN;
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\">\n\
             <title>A boot storm in xdp-imds top</title>\n<style>\n\
             rect {{ fill: #16181d; }}\n\
             text {{ font: 13px ui-monospace, Menlo, Consolas, \"DejaVu Sans Mono\", monospace; fill: #d6d9df; \
             white-space: pre; }}\n\
             .head {{ font-weight: bold; fill: #fff; }}\ng {{ visibility: hidden; }}\n"
        );
        let middle = frames.len() / 2;
        for (number, (at, _)) in frames.iter().enumerate() {
            let from = 100.0 * (at.as_secs_f64() - begin) / all;
            let next = frames.get(number + 1).map_or(end, |(at, _)| at.as_secs_f64());
            let until = 100.0 * (next - begin) / all;
            let before = if from > 0.0 { "0% { visibility: hidden; } " } else { "" };
            let after =
                if until < 100.0 { format!(" {until:.2}% {{ visibility: hidden; }}") } else { String::new() };
            let _ = writeln!(
                text,
                "@keyframes k{number} {{ {before}{from:.2}% {{ visibility: visible; }}{after} }}"
            );
            let still = if number == middle { " visibility: visible;" } else { "" };
            let _ =
                writeln!(text, "#f{number} {{ animation: k{number} {all:.2}s step-end infinite;{still} }}");
        }
        text.push_str(
            "@media (prefers-reduced-motion: reduce) { g { animation: none !important; } }\n</style>\n",
        );
        let _ = writeln!(text, "<rect width=\"{width}\" height=\"{height}\" rx=\"6\"/>");
        for (number, (_, screen)) in frames.iter().enumerate() {
            let _ = writeln!(text, "<g id=\"f{number}\">");
            for (row, line) in screen.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
                let y = MARGIN + CHARACTER.1 * (row as f64 + 0.8);
                let class = if row == 0 { " class=\"head\"" } else { "" };
                // The length keeps columns in place whatever font there is.
                let length = line.chars().count() as f64 * CHARACTER.0;
                let _ = writeln!(
                    text,
                    "<text{class} x=\"{MARGIN}\" y=\"{y:.1}\" textLength=\"{length}\" xml:space=\"preserve\">{}</text>",
                    escaped(line)
                );
            }
            text.push_str("</g>\n");
        }
        text.push_str("</svg>\n");
        text
    }
}

/// Text for XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{FRAMES, Recording, SCREENS, recording};

    #[test]
    fn the_name_of_a_recording_gives_its_form() {
        for (text, is_good) in
            [("a.svg", true), ("/b/c.cast", true), ("a.gif", false), ("svg", false), ("", false)]
        {
            assert_eq!(recording(text).is_ok(), is_good, "{text}");
        }
    }

    fn recorded(screens: usize) -> Recording {
        let mut recording = Recording::default();
        for number in 0..screens {
            recording
                .push(Duration::from_millis(250 * number as u64), format!("title\n\na < b & {number}\n"));
        }
        recording
    }

    #[test]
    fn equal_screens_are_recorded_once() {
        let mut recording = Recording::default();
        for (second, screen) in ["a", "a", "b", "a"].into_iter().enumerate() {
            recording.push(Duration::from_secs(second as u64), screen.into());
        }
        let kept: Vec<_> = recording.screens.iter().map(|(at, screen)| (at.as_secs(), &**screen)).collect();
        assert_eq!(kept, [(0, "a"), (2, "b"), (3, "a")]);
    }

    #[test]
    fn a_long_recording_keeps_its_whole_length_in_fewer_screens() {
        let long = recorded(5 * SCREENS);
        assert!(long.screens.len() <= SCREENS, "{}", long.screens.len());
        let (first, last) = (long.screens[0].0, long.screens[long.screens.len() - 1].0);
        assert!(first.is_zero() && last > Duration::from_secs(SCREENS as u64), "{last:?}");
        assert!(long.frames().len() <= FRAMES);
    }

    #[test]
    fn an_asciicast_has_a_head_and_an_event_for_each_screen() {
        let text = recorded(3).cast();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!((&lines[0]["version"], &lines[0]["width"], lines.len()), (&2.into(), &80.into(), 4));
        assert_eq!(lines[3], serde_json::json!([0.5, "o", "\u{1b}[H\u{1b}[Jtitle\r\n\r\na < b & 2"]));
    }

    #[test]
    fn a_picture_has_a_frame_for_each_screen_and_shows_one_without_animation() {
        for screens in [0, 1, 3] {
            let text = recorded(screens).svg();
            let document =
                roxmltree::Document::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            let frames = document.descendants().filter(|node| node.has_tag_name("g")).count();
            assert_eq!((frames, text.matches("@keyframes").count()), (screens, screens));
            assert_eq!(text.matches("infinite; visibility: visible;").count(), usize::from(screens > 0));
            assert_eq!(
                document.root_element().descendants().filter(|node| node.text() == Some("a < b & 0")).count()
                    > 0,
                screens > 0
            );
        }
    }
}
