"""What a run has taken in, in which order: written while it runs, read to run it again."""

from hybridtrain.recording.record_file import RECORD_NAME, Record
from hybridtrain.recording.record_reader import find_record, read_record
from hybridtrain.recording.recorded_times import service_times

__all__ = ["RECORD_NAME", "Record", "find_record", "read_record", "service_times"]
