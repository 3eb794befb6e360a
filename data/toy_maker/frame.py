"""What all plots share: how a story opens and ends, and what is learned. Written as the beats of plots.py are."""

from __future__ import annotations

OPENINGS = (
    "Once upon a time, there was {a_who} named {N}. {N} lived {place}. ~{He} loved to",
    "Once upon a time, there was {a_who} named {N}. ~{N} lived {place} with",
    "Once upon a time, {place}, there lived {a_who} named {N}. ~Every day, {N}",
    "Once there was {a_who} called {N}. {His} home was {place}. ~In the morning, {he}",
    "{N} was {a_who} who lived {place}. ~{He} liked to",
    "Once upon a time, there was {a_who} named {N}. {N} loved to {hobby}. ~Every day, {he}",
    "Once upon a time, there lived {a_who} {place}. {His} name was {N}, and {he} loved to {hobby}. ~{He} had",
    "{N} was {a_who}. {He} liked to {hobby} more than anything else. ~{N} lived",
    "Far away, {place}, lived {a_who}. Everyone called {him} {N}. ~{N} loved",
    "There was once {a_who} named {N}, who liked to {hobby}. ~{He} lived {place} and",
    "{N} was {a_who}. {He} lived {place}. ~Most of all, {N} loved",
    "Long ago, {a_who} named {N} lived {place}. ~Everyone knew {N} because",
    "There once was {a_who} {place}. {His} name was {N}. ~All day long, {he}",
    "{Place}, there was {a_who}. {His} name was {N}. ~{N} had a",
    "This is the story of {N}, {a_who} who lived {place}. ~Every day, {he}",
)
ENDINGS = (
    "From that day on, {N} and {F} were best friends. ~They",
    "{N} was very happy. ~That night, {he}",
    '{F} smiled at {N}. ~"You are',
    "In the evening, {N} went home with a big smile. ~{He} told",
    "After that, {N} and {F} met every day. ~They",
    '{N} gave {F} a big hug. ~"Thank you',
    "And so {N} and {F} sat down together. ~The sun",
    "{N} and {F} laughed and laughed. ~It was",
    "When the moon came up, {N} was in bed. ~{He} thought",
    '"What a day!" said {N}. ~{F}',
    "The next day, {N} and {F} met again. ~They",
)
MORALS = {
    "help": "it is good to help others|a kind heart is worth more than gold|small friends can be a big help",
    "friend": "a friend makes every day better|it is nice to have a friend|everything is more fun together",
    "hello": "you only have to say hello|a friend makes every day better|friends can look very different",
    "brave": "being brave means trying even when you are afraid|it is fine to be afraid sometimes|"
    "with a friend, nothing is so scary",
    "share": "food tastes best when you share it|sharing makes two people happy",
    "true": "it is best to tell the truth|a mistake is not so bad when you say you are sorry",
    "try": "you can learn anything if you try again|good things take time|you should never give up",
    "home": "home is the best place of all|it is good to listen to your mother|someone is always there to help",
    "kind": "you should not judge others by how they look|big and scary can be gentle and kind",
}
LAST = ("The end.", "And they all lived happily ever after.", "", "", "", "")
